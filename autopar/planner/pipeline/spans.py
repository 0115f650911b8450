"""All runs of segments that may be a stage, and the shortest path over them that makes all segments stages."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence

import numpy as np

from .model import RankSegments, Segment, Shared
from .pareto import Levels, Variant

SAME = 1e-12  # two steps that differ by less of them are equal


class Spans:
    """All runs of segments that may be a stage and take `reach` seconds at most, sorted by `end`: arrays of one number
    a span."""

    def __init__(
        self, segments: Sequence[Segment], stages: int, shared: Sequence[Shared], levels: Levels, reach: float
    ):
        count = len(segments)
        boundaries = np.array([0, *(i for i in range(1, count) if segments[i - 1].may_cut_after), count])
        ends, firsts = np.meshgrid(boundaries[1:], boundaries[:-1], indexing="ij")
        inside = (firsts < ends) & (ends - firsts <= count - stages + 1)
        self.first, self.end = firsts[inside], ends[inside]

        taken = levels.before @ levels.fastest()[0]
        short = taken[self.end] - taken[self.first] <= reach * (1 + SAME)
        self.complete = bool(short.all())
        self.first, self.end = self.first[short], self.end[short]
        self.nodes, self.begin, self.finish = count + 1, [0], [count]  # where paths go along, begin and may end
        self._price(segments, shared, levels)

    def under(self, other: Variant) -> Spans:
        """Return the same spans of segments as they are under another plan."""
        found = copy.copy(self)
        found._price(*other)
        return found

    def _price(self, segments: Sequence[Segment], shared: Sequence[Shared], levels: Levels) -> None:
        self.segments, self.levels, count = segments, levels, len(segments)
        fast_seconds, fast_bytes = levels.fastest()
        self.counts, self.kind = distinct(levels.before[self.end] - levels.before[self.first])
        # spans with the same counts are of one kind
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
        reached = [np.full(self.nodes, np.inf)]
        reached[0][self.begin] = 0.0
        for cost in costs:
            reached.append(np.full_like(reached[0], np.inf))
            reached[-1][ends] = np.minimum.reduceat(join(reached[-2][self.first], cost), offsets)
        end, path = min(self.finish, key=reached[-1].__getitem__), []
        if not math.isfinite(least := reached[-1][end]):
            return math.inf, []
        for before, cost in zip(reached[-2::-1], costs[::-1]):
            low, high = np.searchsorted(self.end, [end, end + 1])
            path.append(low + int(join(before[self.first[low:high]], cost[low:high]).argmin()))
            end = self.first[path[-1]]
        return float(least), path[::-1]

    def stage(self, x: int, flight: float, limit: float, follows: bool = True) -> RankSegments:
        """Return span `x` as the stage that holds `flight` micro-batches; `follows`: another one."""
        frontier = self.levels.frontier(self.counts[self.kind[x]])
        point = int(np.searchsorted(frontier.bytes_, (limit - self.fixed_bytes[x]) / flight, side="right")) - 1
        bytes_ = {name: float(values[x]) for name, values in self.fixed.items()}
        bytes_["activations"] = float(flight * frontier.bytes_[point])
        span, seconds = (int(self.first[x]), int(self.end[x])), float(frontier.seconds[point] + self.sends[x])
        return RankSegments((span,), seconds, float(flight), bytes_, self.levels.counted(frontier, point))


def distinct(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct rows of numbers from 0 on, sorted, and which of them each row is: sorted as one number each,
    where those are small enough."""
    digits = rows.max(0, initial=0).astype(object) + 1
    if not rows.size or digits.prod() >= 2**62:
        found, which = np.unique(rows, axis=0, return_inverse=True)
        return found, which.ravel()
    places = np.append(digits[:0:-1].cumprod()[::-1], 1).astype(np.int64)
    _, first, which = np.unique(rows @ places, return_index=True, return_inverse=True)
    return rows[first], which.ravel()
