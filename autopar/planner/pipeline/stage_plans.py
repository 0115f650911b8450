"""Let each stage of a pipeline take its decisions from another plan of a micro-batch.

Under 1F1B the first ranks hold more micro-batches in flight than the last ones, and the first and the last stage have
the vocabulary: what is best for one is not for the other. So each stage takes the plan under which it takes the fewest
seconds within its rank's memory, of those plans that were found for pipelines of one sharding, while the cut is chosen
(autopar/planner/pipeline/cut_by_plan.py), where what passes between two plans costs what it does in the middle of the
model. The evaluation has the redistributions that are made (autopar/planner/pipeline/mixed.py), and a pipeline of
several plans is taken where it is faster than one of one plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ...plans.pipeline import Pipeline
from ..objective.expand import few_of, recomputes_alike
from ..problem.recipes import FREELY
from ..spmd.fixed_recompute import AUTO
from ..spmd.planned import Planned
from .best_cut import OtherPlans
from .checkpoint import StageRecomputation, recomputation_of_mixture
from .estimate import Estimate, estimate_by_stage
from .mixed import border_seconds, mixed
from .model import StageCut
from .segments import Chain

if TYPE_CHECKING:
    from .search import PipelineSearch


MOST_PLANS = 4  # of which the stages of a pipeline take theirs


def plans_by_stage(search: PipelineSearch, found: Sequence[Estimate]) -> list[Estimate]:
    """Estimate for each schedule that memory slows down a cut whose stages may take any plan of those found; none where
    a strategy or what is computed again was asked for, which all stages follow."""
    options, new = search.plans.options, []
    if options.strategy not in (None, FREELY) or options.recompute != AUTO:
        return []
    plans = sorted(dict.fromkeys(one.inner for one in found), key=lambda one: one.evaluation.seconds)
    by_kind: dict[tuple[str, int], list[Estimate]] = {}
    for one in found:
        by_kind.setdefault((one.schedule, one.stages_per_rank), []).append(one)
    for (kind, v), own in by_kind.items():
        best = min(own, key=lambda one: (not one.fits, one.step_seconds))
        if best.fits and best.inner is plans[0] and best.step_seconds <= best.least_seconds:
            continue  # the fastest plan as it is
        some = _near(search, plans, best.inner)
        chains = [search.segments(one) for one in some]
        if len(some) > 1 and (borders := _borders(search, some, chains[0])) is not None:
            by_stage = estimate_by_stage(search, some, chains, borders, kind, v)
            new += [by_stage] if by_stage is not None else []
    return new


def _near(search: PipelineSearch, plans: Sequence[Planned], first: Planned) -> list[Planned]:
    """Return a plan and those next to it in the order of their seconds that are cut into the same segments."""
    at, segments = plans.index(first), search.segments(first)
    near = sorted(plans, key=lambda one: abs(plans.index(one) - at))
    return [one for one in near if _are_alike(search.segments(one), segments)][:MOST_PLANS]


def _are_alike(one: Chain, other: Chain) -> bool:
    """Return whether two plans are cut into the same segments."""
    return (one.starts, one.begins, one.order) == (other.starts, other.begins, other.order)


def _borders(search: PipelineSearch, plans: Sequence[Planned], segments: Chain) -> np.ndarray | None:
    """Return what passes between plans in the middle of the model (see `border_seconds`); None if they are not of one
    problem."""
    if any(one.problem is not plans[0].problem or not recomputes_alike(one.evaluation) for one in plans):
        return None
    few = [few_of(one.problem, one.evaluation) for one in plans]
    middle = len(segments.starts) // 2
    at = segments.begins[segments.order[middle + 1] - 1].name if segments.begins else segments.starts[middle]
    pricer = replace(plans[0].pricer, problem=few[0][0])
    return border_seconds(few[0][0], [e for _, e in few], at, pricer, search.plans.fastest.solver.free)


class StagePlans:
    """The plans of which the stages of an estimate take theirs, of the whole graph. `others`: all but the first, for
    its cut."""

    def __init__(self, search: PipelineSearch, one: Estimate):
        self.search, self.plans = search, [one.inner]
        self.others: OtherPlans | None = None
        first, segments, _ = search.prepared(one.inner)
        chains = [segments]
        for other in one.others:
            whole, theirs, _ = search.prepared(other)
            if theirs.starts == segments.starts and whole.problem.classes is first.problem.classes:
                self.plans.append(other)
                chains.append(theirs)
        borders = _borders(search, self.plans, search.segments(one.inner)) if one.others else None
        if borders is not None and len(chains) > 1:
            self.others = OtherPlans(chains[1:], borders)

    def chosen(self, cut: StageCut, pipeline: Pipeline) -> tuple[Planned, StageRecomputation | None, tuple[int, ...]]:
        """Return the plan of all stages of a cut, each as its own plan decides, what may be computed again, and the
        numbers of their plans; the first plan alone if one stage cannot be given what another one makes."""
        stages = len(pipeline.cuts) + 1
        of_stage = [cut.stages[s % len(cut.stages)].plan for s in range(stages)]
        first, _, again = self.search.prepared(self.plans[0])
        if not any(of_stage):
            return first, again, ()
        used = sorted(set(of_stage))
        wholes, _, theirs = zip(*(self.search.prepared(self.plans[k]) for k in used))
        numbers = [used.index(k) for k in of_stage]
        prices = self.search.plans.fastest.solver.free
        found = mixed([one.whole for one in wholes], numbers, pipeline.cuts, first.pricer, prices)
        if found is None:
            return first, again, ()
        inner = replace(wholes[0], written=(found.problem, found.evaluation), held=found.live)
        return inner, recomputation_of_mixture(found, theirs, first.pricer, prices), tuple(of_stage)
