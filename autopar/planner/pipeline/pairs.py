"""Forwards beside the backwards of other micro-batches in the stages of a pipeline that was chosen without them.

What a pair of a whole forward and backward gains is played (autopar/planner/objective/side_by_side.py); a stage has the
share of it that it has of the seconds of the exchanges that end turns. A pair of two stages gains what the one that
exchanges less does. A pair holds what both hold, and more micro-batches are in flight: where that is too much, stages
compute more again, as long as the step is shorter for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ...plans.pipeline import Pairs, Pipeline
from ...schedule.pairs import KINDS_IN_PAIRS
from ..objective.beside_exchange import with_beside
from ..objective.evaluate import Evaluation
from ..objective.memory_timeline import live_bytes
from ..objective.player import gained_in_pairs
from ..objective.side_by_side import in_turns
from ..objective.step_order import step_order
from .beside_exchange import found_beside, most_gained_seconds
from .candidate import Candidate
from .checkpoint import MOST_ROUNDS
from .evaluate import PipelineCost, evaluate_pipeline
from .stage_costs import parts_of_nodes

DOUBT = 0.05  # of what others save in pairs, that a pipeline may save more
MOST_PAIRED = 3  # pipelines without products beside rows that are tried in pairs


def fastest_in_pairs(plain: Sequence[Candidate], candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return pipelines, the best first, after the first of some, and the few of the same without products beside rows,
    `plain`, that may be faster so, also by what others gained, were tried in pairs."""
    best, *others = candidates
    if not best.fits:
        return [best, *others]
    limit = best.evaluated.step_seconds
    least = [(one.evaluated.step_seconds - most_gained_seconds(one.search, one.base), one) for one in plain if one.fits]
    near = sorted(((seconds, one) for seconds, one in least if seconds < limit), key=lambda pair: pair[0])
    tried = [best]
    for _, one in near:
        if len(tried) <= MOST_PAIRED and not any(one.is_like(other) for other in tried):
            tried.append(one)
    fastest, share = best, 1.0
    for one in tried:
        made = in_pairs(one, fastest.evaluated.step_seconds, share)
        if made is not None and (pairs := made.evaluated.pipeline.pairs):
            saved = one.evaluated.step_seconds - made.evaluated.step_seconds
            fastest, share = made, min(share, (1 + DOUBT) * saved / pairs.gained_seconds)
    return [best, *others] if fastest is best else [fastest, best, *others]


def in_pairs(one: Candidate, slowest: float = math.inf, share: float = 1.0) -> Candidate | None:
    """Return a pipeline whose forwards run beside backwards, None if that gains nothing, takes `slowest` seconds or
    more, or seems to, or does not fit: what is computed again for that makes it no faster. `share`: of what a mean rank
    gains that a step is shorter at most, as far as others have shown."""
    (problem, e), pipeline = one.inner.whole, one.evaluated.pipeline
    pricer, most_bytes = one.inner.pricer, max(one.limit, one.evaluated.peak_bytes)
    if not _may_be_paired(one, e):
        return None
    recomputation = one.search.prepared(one.base)[2]
    slowest = min(slowest, one.evaluated.step_seconds)
    for turn in range(MOST_ROUNDS + 1):
        made = _paired(one, e, pipeline, slowest, share)
        if made is None or made.step_seconds >= slowest:
            return None
        if made.peak_bytes <= most_bytes:
            inner = replace(one.inner, written=(problem, e), held=live_bytes(problem, e, pricer))
            return replace(one, evaluated=made, inner=inner)
        more = recomputation.within(one.limit, e, made, turn) if recomputation is not None else e
        if more.recompute_seconds == e.recompute_seconds:
            return None
        e = with_beside(more, found_beside(one, more)) if e.beside else more
    return None


def _may_be_paired(one: Candidate, e: Evaluation) -> bool:
    """Return whether micro-batches, of which none waits for others, follow a schedule that has pairs."""
    pipeline, pricer = one.evaluated.pipeline, one.inner.pricer
    is_free = one.search.plans.tail is None and not pricer.problem.tiled and not e.on_host and not one.others
    has_pairs = pipeline.schedule in KINDS_IN_PAIRS and pipeline.row_chunks == 1 and pipeline.pairs is None
    return has_pairs and is_free and e.overlap > 0 and pipeline.micro_batches > 1


def _paired(
    one: Candidate, e: Evaluation, pipeline: Pipeline, slowest: float, share: float = 1.0
) -> PipelineCost | None:
    """Evaluate a pipeline in pairs under an evaluation of its plan, None if it has no exchange worth it, or takes
    `slowest` seconds or more by that `share` of what a mean rank gains."""
    problem, pricer = one.inner.whole[0], one.inner.pricer
    turning = in_turns(problem, e, pricer, one.inner.options.hardware)
    if not turning.turns:
        return None
    order = step_order(problem, e)
    gained = gained_in_pairs(problem, e, turning, pricer, order)
    where, stages = parts_of_nodes(problem.placement(pipeline.cuts)), [0.0] * len(pipeline.costs)
    for exchange in turning.beside:
        if exchange.vertex in turning.turns:
            stage = where[problem.vertices[exchange.vertex].node].bit_length() - 1
            stages[stage] += exchange.seconds * exchange.copies
    if (travelling := sum(stages)) <= 0 or gained <= 0:
        return None
    turns = tuple(problem.vertices[v].node.name for v in sorted(turning.turns))
    by_stage = tuple(gained * seconds / travelling for seconds in stages)
    asked = replace(pipeline, costs=(), pairs=Pairs(turns, 0.0, 0.0, by_stage))
    again = one.search.passes * (e.recompute_seconds - one.inner.whole[1].recompute_seconds)
    gained_in_step = _seconds_in_pairs(asked, by_stage)
    if one.evaluated.step_seconds + again - share * gained_in_step >= slowest:
        return None
    live = live_bytes(problem, turning, pricer, order)
    found = one.search.stages(one.inner, e, asked, live, one.inner.stretch)
    made = evaluate_pipeline(
        problem, e, pricer, asked, one.search.send, live, not one.evaluated.unmade_bytes,
        one.search.plans.tail_cost, found,
    )  # fmt: skip
    in_step = Pairs(turns, _seconds_in_pairs(asked, stages), gained_in_step, by_stage)
    return replace(made, pipeline=replace(made.pipeline, pairs=in_step))


def _seconds_in_pairs(pipeline: Pipeline, seconds: Sequence[float]) -> float:
    """Return the seconds of a step that a mean rank has in pairs, given those of a pair of each stage."""
    orders, shares, total = pipeline.orders, pipeline.shares, 0.0
    for rank in range(pipeline.ranks):
        for both in orders.together(rank):
            if len(both) == 2:
                total += min(seconds[a.stage] for a in both) * min(shares[a.micro_batch] for a in both)
    return total / pipeline.ranks
