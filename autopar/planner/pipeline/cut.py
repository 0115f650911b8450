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
from collections.abc import Callable, Sequence

import numpy as np

from ...errors import MemoryInfeasibleError, StrategyError
from ...utils.format import size
from .model import RankSegments, Segment, Shared, StageCut, Timing
from .pareto import Levels

FIRST_REACH = 2.0  # stages of up to so many times the mean seconds are looked at first
SAME = 1e-12  # two steps that differ by less of them are equal


def cut_stages(
    segments: Sequence[Segment],
    stages: int,
    micro_batches: int,
    limit_bytes: float,
    timing: Timing,
    shared: Sequence[Shared] = (),
    levels: Levels | None = None,
) -> StageCut:
    """Return the cut with the shortest step in which every stage fits `limit_bytes`. `levels`: of the segments, if some
    are known.

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
        spans = Spans(segments, stages, shared, levels, reach)
        step, path = fastest(spans, spans.seconds(flight, limit_bytes), micro_batches, timing.bubble_factor)
        if spans.complete or step <= (micro_batches - timing.bubble_factor) * reach + timing.bubble_factor * total:
            break  # no stage longer than `reach` makes a shorter step
        reach *= 4
    if not path:
        raise infeasible(spans, flight, limit_bytes, timing)
    found = tuple(spans.stage(x, flight[s], limit_bytes) for s, x in enumerate(path))
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


class Spans:
    """All runs of segments that may be a stage and take `reach` seconds at most, sorted by `end`: arrays of one number
    a span."""

    def __init__(
        self, segments: Sequence[Segment], stages: int, shared: Sequence[Shared], levels: Levels, reach: float
    ):
        self.segments, self.levels, count = segments, levels, len(segments)
        boundaries = np.array([0, *(i for i in range(1, count) if segments[i - 1].may_cut_after), count])
        ends, firsts = np.meshgrid(boundaries[1:], boundaries[:-1], indexing="ij")
        inside = (firsts < ends) & (ends - firsts <= count - stages + 1)
        self.first, self.end = firsts[inside], ends[inside]

        fast_seconds, fast_bytes = levels.fastest()
        short = (levels.before @ fast_seconds)[self.end] - (levels.before @ fast_seconds)[self.first] <= reach * (
            1 + SAME
        )
        self.complete = bool(short.all())
        self.first, self.end = self.first[short], self.end[short]
        self.counts, kind = np.unique(levels.before[self.end] - levels.before[self.first], axis=0, return_inverse=True)
        self.kind = kind.ravel()  # spans with the same counts are of one kind
        self.fast_seconds, self.fast_bytes = (self.counts * fast_seconds).sum(1), (self.counts * fast_bytes).sum(1)
        self.least_bytes = (self.counts * levels.least()).sum(1)

        def at_cuts(values: Sequence[float]) -> np.ndarray:  # of the cut before each segment
            return np.array([0, *values[:-1], 0])

        forward, backward = (at_cuts([segment.boundary_seconds[way] for segment in segments]) for way in (0, 1))
        self.sends = forward[self.end] + backward[self.first]
        buffers = at_cuts([segment.boundary_bytes for segment in segments])
        state = np.cumsum([0, *(segment.state_bytes for segment in segments)])
        peaks = np.zeros((count, count + 1))
        transient = np.array([segment.transient_bytes for segment in segments])
        for i in range(count):
            peaks[i, i + 1 :] = np.maximum.accumulate(transient[i:])
        self.fixed = {
            "state": state[self.end] - state[self.first],
            "transient": peaks[self.first, self.end],
            "boundary": buffers[self.end] + buffers[self.first],
        }
        self.shared_seconds = np.zeros(len(self.first))
        for one in shared:
            a, b = sorted((one.first, one.second))
            has_a, has_b = ((self.first <= x) & (x < self.end) for x in (a, b))
            self.fixed["state"] = self.fixed["state"] - one.bytes_ * (has_a & has_b)
            self.shared_seconds += one.seconds * (has_a & ~has_b)  # paid once, by the stage with the first of the two
        self.fixed_bytes = sum(self.fixed.values())

    def seconds(self, flight: np.ndarray, limit: float) -> np.ndarray:
        """Return (stages, spans): the fewest seconds of each span as each stage, inf where it does not fit."""
        room = (limit - self.fixed_bytes) / flight[:, None]  # activation bytes of a micro-batch
        found = np.where(room >= self.fast_bytes[self.kind], self.fast_seconds[self.kind], np.inf)
        open_ = (room >= self.least_bytes[self.kind]) & (room < self.fast_bytes[self.kind])
        members = np.argsort(self.kind, kind="stable")
        borders = np.searchsorted(self.kind[members], np.arange(len(self.counts) + 1))
        for kind in np.unique(self.kind[open_.any(0)]):
            spans = members[borders[kind] : borders[kind + 1]]
            frontier = self.levels.frontier(self.counts[kind])
            point = np.searchsorted(frontier.bytes_, room[:, spans], side="right") - 1
            found[:, spans] = np.where(open_[:, spans], frontier.seconds[point], found[:, spans])
        return found + self.sends

    def path(self, costs: np.ndarray, join: Callable = np.add) -> tuple[float, list[int]]:
        """Find the cheapest way to cut all segments into one span a stage: (cost, spans), (inf, []) if there is none.
        `costs` are by stage and span; `join` combines a stage's with those before it."""
        ends, offsets = np.unique(self.end, return_index=True)
        reached = [np.full(len(self.segments) + 1, np.inf)]
        reached[0][0] = 0.0
        for cost in costs:
            reached.append(np.full_like(reached[0], np.inf))
            reached[-1][ends] = np.minimum.reduceat(join(reached[-2][self.first], cost), offsets)
        end, path = len(self.segments), []
        if not math.isfinite(reached[-1][end]):
            return math.inf, []
        for before, cost in zip(reached[-2::-1], costs[::-1]):
            low, high = np.searchsorted(self.end, [end, end + 1])
            path.append(low + int(join(before[self.first[low:high]], cost[low:high]).argmin()))
            end = self.first[path[-1]]
        return float(reached[-1][-1]), path[::-1]

    def stage(self, x: int, flight: float, limit: float) -> RankSegments:
        """Return span `x` as the stage that holds `flight` micro-batches."""
        frontier = self.levels.frontier(self.counts[self.kind[x]])
        point = int(np.searchsorted(frontier.bytes_, (limit - self.fixed_bytes[x]) / flight, side="right")) - 1
        bytes_ = {name: float(values[x]) for name, values in self.fixed.items()}
        bytes_["activations"] = float(flight * frontier.bytes_[point])
        span, seconds = (int(self.first[x]), int(self.end[x])), float(frontier.seconds[point] + self.sends[x])
        return RankSegments((span,), seconds, float(flight), bytes_, self.levels.counted(frontier, point))


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
