"""Megatron's mapping of a mixture of experts as a candidate of a search without a strategy.

What that mapping allows is searched beside everything, from the fastest plan of a micro-batch on. If some of its plans
may be faster, those with experts cut over the tensor axis too are a search of their own, unless all have them so: where
rows travel beside compute a plan that sends fewer of them is faster, which the price of rows that are waited for does
not tell. Plans of both are plans of the free search like any other: pipelines are cut from them, and single stages may
take them.

So with the same micro-batches and schedule no plan is slower than the mapping: its pipelines are evaluated, unless a
plan of the search takes fewer seconds and bytes a micro-batch, whether rows of experts travel beside compute or not, or
they are estimated to be slower by more than an estimate errs. That is said of plans without pairs (pairs.py), which
come after it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..objective.beside_exchange import exchanged_seconds
from ..objective.evaluate import Evaluation
from ..problem.labels import factors_of
from ..problem.problem import Problem
from ..problem.recipes import FREELY, Restriction, mapping_of_experts
from ..solver.solver import Solver
from ..spmd.fixed_recompute import AUTO
from ..spmd.planned import Planned
from .beside_exchange import most_gained_seconds
from .candidate import Candidate
from .estimate import Estimate, estimate, even_seconds
from .micro_batch_plans import Useful

DOUBT = 5e-3  # of a step, that an estimate may be too long; 0.2 % were seen


def mapped(best: Candidate, known: Sequence[Estimate]) -> list[Estimate]:
    """Estimate pipelines of the plans that the mapping allows, with the schedule of the best pipeline; none of a model
    without experts, or where something of the sharding or of what is computed again was asked for. `known`: what was
    estimated without it."""
    search, pipeline = best.search, best.evaluated.pipeline
    plans, options = search.plans, search.plans.options
    name, kind, v = mapping_of_experts(plans.mesh), pipeline.schedule, pipeline.stages_per_rank
    is_asked = options.strategy not in (None, FREELY) or options.pin or options.forbid or options.recompute != AUTO
    if is_asked or name is None or not plans.solvers[0].problem.owned_axes:
        return []
    plans.report(name)
    others = [_Bounds.of(one) for one in dict.fromkeys(one.inner for one in known if one.search is search)]
    restriction, found = Restriction.of(name, plans.mesh), list[Estimate]()
    met: list[Evaluation] = []
    for pin in ({}, *_folded(plans.solvers[0].problem, restriction)):
        if met and (not found or all(_is_allowed(e, plans.solvers[0], restriction, pin) for e in met)):
            continue
        useful = Useful()
        for planned in plans.under(name, pin).at_prices(useful):
            useful.times = math.inf
            met.append(planned.evaluation)
            if any(one.is_below(_Bounds.of(planned)) for one in others):
                continue
            inner = replace(planned, options=options, chosen=plans.renamed(planned.chosen))
            segments = search.segments(inner)
            least = even_seconds(search, segments, kind, v) - most_gained_seconds(search, inner)
            if least >= best.evaluated.step_seconds:
                break
            useful.note(best.evaluated.step_seconds, least)
            found.append(estimate(search, inner, segments, kind, v, best.evaluated.step_seconds))
    return found


def _is_allowed(e: Evaluation, solver: Solver, restriction: Restriction, pin: Mapping[str, str]) -> bool:
    """Return whether a plan is one of those that a search with parameters pinned would look for."""
    masks = solver.allowed(restriction, dict(pin))
    return all(masks[v.cls][e.choice[v.index]] for v in solver.problem.vertices)


def _folded(problem: Problem, restriction: Restriction) -> Iterator[dict[str, str]]:
    """Iterate over the layouts of experts that are cut by expert over the tensor axis too, as there are enough of
    them: attention keeps that axis for its heads."""
    axes, factors = (restriction.experts, *restriction.tensor_axes), factors_of(problem, False)
    stacks = [v.node.meta for v in problem.vertices if v.kind == "parameter" and 0 in factors[v.cls].expert]
    devices = math.prod(map(problem.mesh.size, axes))
    if stacks and all(meta["val"].shape[0] % devices == 0 for meta in stacks):
        yield {meta["role"].name: " ".join(f"{axis}:S(0)" for axis in axes) for meta in stacks}


class _Bounds(NamedTuple):
    """The seconds and bytes of a plan of a micro-batch, and its seconds if all of its rows travelled beside compute."""

    seconds: float
    least_seconds: float
    bytes_: float

    @classmethod
    def of(cls, planned: Planned) -> _Bounds:
        """Return those of a plan."""
        e = planned.evaluation
        hidden = exchanged_seconds(planned.problem, e, planned.pricer, planned.options.hardware)
        return cls(e.seconds, e.seconds - hidden, e.bytes_)

    def is_below(self, other: _Bounds) -> bool:
        """Return whether this plan holds no more and is no slower than another one, rows hidden or not."""
        return all(mine <= its for mine, its in zip(self, other))


def _least_seconds(one: Estimate) -> float:
    return one.step_seconds - most_gained_seconds(one.search, one.inner)


def evaluated_if_near(estimates: Sequence[Estimate], seconds: float) -> list[Candidate]:
    """Evaluate pipelines that may take less than `seconds`, as those that are planned for the mapping alone are; where
    they may with products beside their exchanges alone, the most promising one."""
    near = [one for one in estimates if one.fits and one.step_seconds * (1 - DOUBT) < seconds]
    if not near and (fitting := [one for one in estimates if one.fits]):
        least = min(fitting, key=_least_seconds)
        near = [least] if _least_seconds(least) * (1 - DOUBT) < seconds else []
    found = [one.search.evaluated(one) for one in near]
    return [each for one in found for each in (one, *one.search.from_elsewhere(one))]
