"""The exact cut of a chain of segments into pipeline stages, and how many segments of each stage run at which level.

    minimize    (m - bubble_factor) T + sum over stages (bubble_factor t[s] + shared[s])     (the step of stages.py)
    where       t[s] <= T,    state + transient + buffers + in_flight[s] * activations <= limit

A stage is better the less seconds it takes, whatever T is, so its levels are chosen first and alone (pareto.py);
what is left is a shortest path over cuts for each T. The sum falls as T rises: between two T that were tried, no T is
better than the smaller T with the larger one's sum, and most are never tried. Stages with the same segments are solved
once. The path for each T is that of Alpa (Zheng et al., arXiv:2201.12023), whose stages also choose their devices, but
not how much they compute again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ...errors import MemoryInfeasibleError, StrategyError
from ...utils.format import size
from .cut_by_plan import SpansByPlan
from .model import Segment, Shared, StageCut, Timing
from .pareto import Levels, Variants
from .spans import SAME, Spans

FIRST_REACH = 2.0  # stages of up to so many times the mean seconds are looked at first


def cut_stages(
    segments: Sequence[Segment],
    stages: int,
    micro_batches: int,
    limit_bytes: float,
    timing: Timing,
    shared: Sequence[Shared] = (),
    levels: Levels | None = None,
    others: Variants | None = None,
) -> StageCut:
    """Return the cut with the shortest step in which every stage fits `limit_bytes`. `levels`: of the segments, if some
    are known; `others`: what the segments are under other plans, of which each stage may take one
    (autopar/planner/pipeline/cut_by_plan.py).

    Raise StrategyError where there are fewer boundaries than stages need, or for segments of one kind with different
    levels, and MemoryInfeasibleError, with the stage and the bytes that the most even use of memory lacks there, where
    nothing fits.
    """
    if timing.looped > 1:
        raise StrategyError(
            f"{timing.name} has {timing.looped} stages a rank", fix="use cut_looped of cut_interleaved.py"
        )
    check(segments, stages, micro_batches, timing)
    levels, flight = (
        levels or Levels(segments),
        np.array([timing.in_flight(stages, s, micro_batches) for s in range(stages)], dtype=float),
    )
    total = float(levels.before[-1] @ levels.fastest()[0])
    reach = FIRST_REACH * total / stages
    while True:
        own = Spans(segments, stages, shared, levels, reach)
        spans = own if others is None else SpansByPlan(own, others)
        step, path = fastest(spans, spans.seconds(flight, limit_bytes), micro_batches, timing.bubble_factor)
        if spans.complete or step <= (micro_batches - timing.bubble_factor) * reach + timing.bubble_factor * total:
            break  # no stage longer than `reach` makes a shorter step
        reach *= 4
    if not path:
        raise infeasible(own, flight, limit_bytes, timing)
    found = tuple(spans.stage(x, flight[s], limit_bytes, s > 0) for s, x in enumerate(path))
    apart = float(spans.shared_seconds[path].sum())
    step = timing.step_seconds([stage.seconds for stage in found], micro_batches) + apart
    return StageCut(found, timing, micro_batches, step, apart, step)


def check(segments: Sequence[Segment], stages: int, micro_batches: int, timing: Timing) -> None:
    """Raise StrategyError for too few micro-batches, boundaries or stages, and for segments without a level or of
    one kind with different ones."""
    if stages < 1 or micro_batches < max(1, timing.bubble_factor):
        raise StrategyError(
            f"{stages} stages and {micro_batches} micro-batches make no pipeline", fix="use 1 or more of both"
        )
    most = len(segments) and 1 + sum(segment.may_cut_after for segment in segments[:-1])
    if stages > most:
        raise StrategyError(
            f"{len(segments)} segments that may be cut into {most} stages are too few for {stages}",
            fix=f"use {most} stages or less",
        )
    by_kind: dict[str, Segment] = {}
    for segment in segments:
        if not segment.levels or by_kind.setdefault(segment.kind, segment).levels != segment.levels:
            raise StrategyError(
                f"segments of kind {segment.kind!r} have no level, or not the same ones",
                fix="give segments with different levels different kinds",
            )


def fastest(spans: Spans, seconds: np.ndarray, micro_batches: int, bubble_factor: float) -> tuple[float, list[int]]:
    """Return the shortest step and its path over `spans`: (inf, []) if there is none."""
    fits = np.isfinite(seconds)
    weights = bubble_factor * np.where(fits, seconds, 0.0) + spans.shared_seconds
    times = np.unique(seconds[fits])  # all that T can be
    best: tuple[float, list[int]] = (math.inf, [])

    def solve(k: int) -> tuple[int, float]:
        """Return the cheapest sum with T = times[k], and the number of the T that it needs."""
        nonlocal best
        weight, path = spans.path(np.where(seconds <= times[k], weights, np.inf))
        if not path:
            return k, math.inf
        slowest = max(seconds[s, x] for s, x in enumerate(path))
        best = min(best, ((micro_batches - bubble_factor) * float(slowest) + weight, path), key=lambda found: found[0])
        return int(np.searchsorted(times, slowest)), weight

    if not len(times):
        return best
    ranges = [(-1, math.inf, *solve(len(times) - 1))]  # (T tried, its sum, a larger T tried, its sum)
    while ranges:
        low, low_sum, high, high_sum = ranges.pop()
        if high - low < 2 or low_sum <= high_sum * (1 + SAME):
            continue
        if (micro_batches - bubble_factor) * times[low + 1] + high_sum >= best[0] * (1 - SAME):
            continue
        middle = (low + high) // 2
        needed, middle_sum = solve(middle)
        ranges += [(middle, middle_sum, high, high_sum), (low, low_sum, needed, middle_sum)]  # the smaller T first
    return best


def infeasible(spans: Spans, flight: np.ndarray, limit: float, timing: Timing) -> MemoryInfeasibleError:
    """Return the error for a limit that no cut fits, with the numbers of the cut whose fullest stage is the least full,
    everything at the most frugal level."""
    activations = flight[:, None] * spans.least_bytes[spans.kind]
    need, path = spans.path(spans.fixed_bytes + activations, np.maximum)
    stage = max(range(len(path)), key=lambda s: activations[s, path[s]] + spans.fixed_bytes[path[s]])
    x, missing = path[stage], math.ceil(need - limit)
    bytes_ = {name: float(values[x]) for name, values in spans.fixed.items()} | {
        "activations": float(activations[stage, x])
    }
    return MemoryInfeasibleError(
        f"no cut into {len(path)} stages fits {size(limit)} with {timing.name}: stage {stage}, "
        f"segments {spans.first[x]} "
        f"to {spans.end[x] - 1}, needs {size(need)}, {size(missing)} more than there are",
        missing_bytes=missing,
        breakdown=bytes_,
        fix="use more stages, smaller micro-batches, or a schedule with fewer in flight",
    )
