"""Products beside exchanges of experts' rows in the stages of a pipeline that was chosen without them.

What autopar/planner/objective/beside_exchange.py finds is taken where an exchange and its products are in one stage.
Where a schedule splits backwards gradients of weights are computed later, and are beside nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import fx

from ..objective.beside import Beside
from ..objective.beside_exchange import beside_exchanges, choices_of, exchanged_seconds, fitted, like_those_at
from ..objective.evaluate import Evaluation
from ..objective.memory_timeline import LiveBytes
from ..spmd.planned import Planned
from .candidate import Candidate
from .evaluate import PipelineCost
from .on_host import evaluated_with
from .search import PipelineSearch
from .stage_costs import COMING_AND_GOING, SEVERAL, gradients_of, parts_of_nodes

MOST_OTHERS = 2  # pipelines that are given products beside exchanges as well as the best without


def fastest_with_exchanges(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return pipelines, the best first, with products beside the exchanges of the first of some, and of the few others
    that may be faster with theirs."""
    best, *others = candidates
    best = with_exchanges(best)
    limit = best.evaluated.step_seconds
    near = [i for i, one in enumerate(others) if best.fits and one.fits and _least_seconds(one) < limit]
    tried = [candidates[0]]
    for i in sorted(near, key=lambda i: _least_seconds(others[i])):
        if len(tried) > MOST_OTHERS or any(others[i].is_like(other) for other in tried):
            continue
        tried.append(others[i])
        others[i] = with_exchanges(others[i])
        if others[i].evaluated.step_seconds < best.evaluated.step_seconds:
            best, others[i] = others[i], best
    return [best, *others]


def _least_seconds(one: Candidate) -> float:
    return one.evaluated.step_seconds - most_gained_seconds(one.search, one.base)


def most_gained_seconds(search: PipelineSearch, inner: Planned) -> float:
    """Return the seconds of a step that products beside exchanges save at most: all of their way, on every rank."""
    on_the_way = exchanged_seconds(inner.problem, inner.evaluation, inner.pricer, inner.options.hardware)
    return on_the_way * search.passes


def with_exchanges(one: Candidate) -> Candidate:
    """Return a pipeline with products beside its exchanges, as far as they fit, if all together gain."""
    stages, found = _Stages(one), found_beside(one, one.inner.whole[1])
    for other in filter(None, (stages.taking(some) for some in choices_of(found))):
        gained_seconds = one.evaluated.step_seconds - other.evaluated.step_seconds
        if gained_seconds > 0:
            return replace(other, gained_seconds=gained_seconds)
    return one


def found_beside(one: Candidate, e: Evaluation) -> tuple[Beside, ...]:
    """Return what may be beside the exchanges of a pipeline under an evaluation that has nothing there yet."""
    problem, known = one.inner.whole
    order = one.inner.live_bytes.order if e is known else None
    return beside_exchanges(problem, e, one.inner.pricer, one.inner.options.hardware, _Stages(one).may_move, order)


class _Stages:
    """The stages of a pipeline, what of their backwards may run later, and what they hold."""

    def __init__(self, one: Candidate):
        (self.problem, self.e), self.one = one.inner.whole, one
        self.orders = one.evaluated.pipeline.orders
        self.part = parts_of_nodes(self.problem.placement(one.evaluated.pipeline.cuts))
        is_split = any(action.kind == "W" for order in self.orders.orders for action in order)
        self.gradient_of = gradients_of(self.problem.graph) if is_split else {}
        self.made: PipelineCost = one.evaluated

    def may_move(self, exchange: fx.Node, node: fx.Node) -> bool:
        """Return whether an op is in the stage of an exchange, and runs when that does."""
        is_here = self.part.get(exchange) == self.part.get(node)
        return is_here and self.gradient_of.get(node, SEVERAL) == SEVERAL

    def taking(self, found: Sequence[Beside]) -> Candidate | None:
        """Return the pipeline with as much of `found` beside its exchanges as fits, None if nothing does."""
        other = fitted(self.problem, self.e, found, self.one.inner.pricer, self._given_up)
        if other is None:
            return None
        inner = replace(self.one.inner, written=(self.problem, other), held=None)
        return replace(self.one, evaluated=self.made, inner=inner)

    def _given_up(self, tried: Evaluation, live: LiveBytes) -> list[Beside]:
        """Return what a plan gives up: on each rank that holds too much what is on its way when it holds most."""
        self.made = evaluated_with(self.one, tried, live)
        most_bytes = max(self.one.limit, self.one.evaluated.peak_bytes)
        passing = [live.kinds[kind] for kind in COMING_AND_GOING if kind in live.kinds]
        held = sum(passing, np.zeros(len(live.order.runs)))
        found: list[Beside] = []
        for rank, memory in enumerate(self.made.memory):
            if sum(memory.values()) > most_bytes:
                mine = sum(1 << stage for stage in self.orders.stages_of(rank))
                places = [i for i, run in enumerate(live.order.runs) if self._part(run.vertex) & mine]
                full = live.order.runs[max(places, key=held.__getitem__)].vertex
                here = [one for one in tried.beside if self._part(one.vertex) & mine]
                found += like_those_at(self.problem, here, full)
        return found if self.made.peak_bytes <= most_bytes or found else [*tried.beside]

    def _part(self, vertex: int) -> int:
        return self.part.get(self.problem.vertices[vertex].node, 0)
