"""Products beside exchanges of experts' rows in the stages of a pipeline that was chosen without them.

What autopar/planner/objective/beside_exchange.py finds is taken where an exchange and its products are in one stage.
Where a schedule splits backwards gradients of weights are computed later, and are beside nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from ..objective.beside_exchange import beside_exchanges, choices_of, fitted, with_beside
from ..objective.evaluate import Beside, Evaluation
from ..objective.memory_timeline import LiveBytes
from .evaluate import PipelineCost
from .on_host import evaluated_with
from .search import Candidate
from .stage_costs import COMING_AND_GOING, SEVERAL, gradients_of, parts_of_nodes


def with_exchanges(one: Candidate) -> Candidate:
    """Return a pipeline with products beside its exchanges, as far as they fit, if all together gain."""
    (problem, e), hardware = one.inner.whole, one.inner.options.hardware
    found = beside_exchanges(problem, e, one.inner.pricer, hardware, _Stages(one).may_move)
    made = (_taking(one, some) for some in choices_of(found))
    return next((other for other in made if other and other.evaluated.step_seconds < one.evaluated.step_seconds), one)


def _taking(one: Candidate, found: Sequence[Beside]) -> Candidate | None:
    """Return a pipeline with as much of `found` beside its exchanges as fits, None if nothing does."""
    (problem, e), pricer = one.inner.whole, one.inner.pricer
    made: list[tuple[PipelineCost, LiveBytes]] = []

    def full_at(tried: Evaluation, live: LiveBytes) -> int | None:
        made.append((evaluated_with(one, tried, live), live))
        if made[-1][0].peak_bytes <= max(one.limit, one.evaluated.peak_bytes):
            return None
        return int(sum(live.kinds[kind] for kind in COMING_AND_GOING if kind in live.kinds).argmax())

    other = fitted(problem, e, found, pricer, full_at)
    if other is None:
        return None
    cost, live = made[-1]
    return replace(one, evaluated=cost, inner=replace(one.inner, written=(problem, other), held=live))


def gained_seconds(one: Candidate) -> float:
    """Return the seconds of a step by which products beside its exchanges make a pipeline faster."""
    e = one.inner.whole[1]
    if not e.beside:
        return 0.0
    return evaluated_with(one, with_beside(e, ())).step_seconds - one.evaluated.step_seconds


class _Stages:
    """The stages of a pipeline, and what of their backwards may run later."""

    def __init__(self, one: Candidate):
        problem, pipeline = one.inner.whole[0], one.evaluated.pipeline
        self.part = parts_of_nodes(problem.placement(pipeline.cuts))
        is_split = any(action.kind == "W" for order in pipeline.orders.orders for action in order)
        self.gradient_of = gradients_of(problem.graph) if is_split else {}

    def may_move(self, exchange: fx.Node, node: fx.Node) -> bool:
        """Return whether an op is in the stage of an exchange, and runs when that does."""
        is_here = self.part.get(exchange) == self.part.get(node)
        return is_here and self.gradient_of.get(node, SEVERAL) == SEVERAL
