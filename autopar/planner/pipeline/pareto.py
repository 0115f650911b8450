"""Choose the levels that the segments of a stage run at: the fewest seconds for every number of activation bytes.

Pieces of one kind are interchangeable, so a stage is the count of each kind, and all stages with the same counts,
wherever they begin and however many micro-batches they hold, read their answer from one frontier. It is exact: the
frontier of some segments and one more is what no other sum of a point of theirs and a level of its own beats (Nemhauser
and Ullmann, Management Science 15(9), 1969). n equal segments with two levels have n + 1 points; segments that all
differ may have many more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .model import Segment, Shared


@dataclass(frozen=True, eq=False)
class Frontier:
    """Points of rising `bytes_` (of one micro-batch) and falling `seconds`; each is point `came_from` of `fewer`
    segments and one more segment of kind number `kind` at `level`."""

    bytes_: np.ndarray
    seconds: np.ndarray
    fewer: Frontier | None = None
    kind: int = -1
    came_from: np.ndarray | None = None
    level: np.ndarray | None = None

    def add(self, kind: int, segment: Segment) -> Frontier:
        """Return the frontier of these segments and one more, of kind number `kind`."""
        levels = segment.levels
        bytes_ = np.add.outer([level.activation_bytes for level in levels], self.bytes_).ravel()
        seconds = np.add.outer([level.seconds for level in levels], self.seconds).ravel()
        order = bytes_.argsort(kind="stable")  # every level is sorted: as many runs to merge
        sorted_ = seconds[order]
        is_faster = np.ones(len(order), bool)
        np.less(sorted_[1:], np.minimum.accumulate(sorted_)[:-1], out=is_faster[1:])
        order = order[is_faster]
        last = np.append(np.diff(bytes_[order]) > 0, True)  # of equal bytes the fewest seconds
        efficient = order[last]
        level, came_from = np.divmod(efficient, len(self.bytes_))
        return Frontier(bytes_[efficient], seconds[efficient], self, kind, came_from, level)


class Levels:
    """Frontiers of all counts that were asked for. `kinds`: one segment of each kind, the most frequent first, so that
    stages that differ in rare segments share the frontiers of the others."""

    def __init__(self, segments: Sequence[Segment]):
        by_kind = {segment.kind: segment for segment in segments}
        self.kinds = [by_kind[kind] for kind, _ in Counter(segment.kind for segment in segments).most_common()]
        number = {segment.kind: k for k, segment in enumerate(self.kinds)}
        counts = np.zeros((len(segments) + 1, len(self.kinds)), dtype=np.int64)
        counts[1 + np.arange(len(segments)), [number[segment.kind] for segment in segments]] = 1
        self.before = counts.cumsum(0)  # how many of each kind come before a segment
        self.known = {(0,) * len(self.kinds): Frontier(np.zeros(1, dtype=np.int64), np.zeros(1))}

    def fastest(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (seconds, bytes) of each kind where memory does not matter."""
        best = [min((level.seconds, level.activation_bytes) for level in segment.levels) for segment in self.kinds]
        return np.array([s for s, _ in best]), np.array([b for _, b in best])

    def least(self) -> np.ndarray:
        """Return the activation bytes of each kind at its most frugal level."""
        return np.array([min(level.activation_bytes for level in segment.levels) for segment in self.kinds])

    def frontier(self, counts: Sequence[int]) -> Frontier:
        """Return the frontier of so many segments of each kind."""
        counts, missing = tuple(map(int, counts)), []
        while counts not in self.known:
            last = max(k for k, count in enumerate(counts) if count)
            missing.append((counts, last))
            counts = (*counts[:last], counts[last] - 1, *counts[last + 1 :])
        frontier = self.known[counts]
        for counts, last in reversed(missing):
            frontier = self.known[counts] = frontier.add(last, self.kinds[last])
        return frontier

    def counted(self, frontier: Frontier, point: int) -> dict[str, tuple[int, ...]]:
        """Count the segments of each kind at each of its levels, at one point of a frontier."""
        found: dict[int, Counter] = {}
        while frontier.fewer is not None:
            found.setdefault(frontier.kind, Counter())[int(frontier.level[point])] += 1
            frontier, point = frontier.fewer, int(frontier.came_from[point])
        return {self.kinds[k].kind: tuple(found[k][l] for l in range(len(self.kinds[k].levels))) for k in sorted(found)}


# the segments as they are under one plan of a micro-batch, with what they share and their levels
Variant = tuple[Sequence[Segment], Sequence[Shared], Levels]


@dataclass(frozen=True, eq=False)
class Variants:
    """Other plans of a micro-batch, of which a stage may take one. `borders`: by plan of a stage and of the next one,
    seconds of a micro-batch to redistribute what passes, inf where that cannot be; the plan itself is number 0."""

    plans: Sequence[Variant]
    borders: np.ndarray
