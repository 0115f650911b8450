"""Which levels the pieces of a stage run at: the fewest seconds for every number of activation bytes.

Pieces of one kind are interchangeable, so a stage is the count of each kind, and all stages with the same counts,
wherever they begin and however many micro-batches they hold, read their answer from one frontier. It is exact: the
frontier of some pieces and one more is what no other sum of a point of theirs and a level of its own beats (Nemhauser
and Ullmann, Management Science 15(9), 1969). n equal pieces with two levels have n + 1 points; pieces that all differ
may have many more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .model import Piece


@dataclass(frozen=True, eq=False)
class Frontier:
    """Points of rising `bytes_` (of one micro-batch) and falling `seconds`; each is point `came_from` of `fewer` pieces
    and one more piece of kind number `kind` at `level`."""

    bytes_: np.ndarray
    seconds: np.ndarray
    fewer: Frontier | None = None
    kind: int = -1
    came_from: np.ndarray | None = None
    level: np.ndarray | None = None

    def add(self, kind: int, piece: Piece) -> Frontier:
        """Return the frontier of these pieces and one more, of kind number `kind`."""
        more = (
            np.array([level.activation_bytes for level in piece.levels]),
            np.array([level.seconds for level in piece.levels]),
        )
        bytes_, seconds = ((mine[:, None] + its).ravel() for mine, its in zip((self.bytes_, self.seconds), more))
        order = np.lexsort((seconds, bytes_))
        before = np.concatenate([[np.inf], np.minimum.accumulate(seconds[order])[:-1]])
        kept = order[seconds[order] < before]
        return Frontier(bytes_[kept], seconds[kept], self, kind, *np.divmod(kept, len(piece.levels)))


class Levels:
    """Frontiers of all counts that were asked for. `kinds`: one piece of each kind, the most frequent first, so that
    stages that differ in rare pieces share the frontiers of the others."""

    def __init__(self, pieces: Sequence[Piece]):
        by_kind = {piece.kind: piece for piece in pieces}
        self.kinds = [by_kind[kind] for kind, _ in Counter(piece.kind for piece in pieces).most_common()]
        number = {piece.kind: k for k, piece in enumerate(self.kinds)}
        counts = np.zeros((len(pieces) + 1, len(self.kinds)), dtype=np.int64)
        counts[1 + np.arange(len(pieces)), [number[piece.kind] for piece in pieces]] = 1
        self.before = counts.cumsum(0)  # how many of each kind come before a piece
        self.known = {(0,) * len(self.kinds): Frontier(np.zeros(1, dtype=np.int64), np.zeros(1))}

    def fastest(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (seconds, bytes) of each kind where memory does not matter."""
        best = [min((level.seconds, level.activation_bytes) for level in piece.levels) for piece in self.kinds]
        return np.array([s for s, _ in best]), np.array([b for _, b in best])

    def least(self) -> np.ndarray:
        """Return the activation bytes of each kind at its most frugal level."""
        return np.array([min(level.activation_bytes for level in piece.levels) for piece in self.kinds])

    def frontier(self, counts: Sequence[int]) -> Frontier:
        """Return the frontier of so many pieces of each kind."""
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
        """Count the pieces of each kind at each of its levels, at one point of a frontier."""
        found: dict[int, Counter] = {}
        while frontier.fewer is not None:
            found.setdefault(frontier.kind, Counter())[int(frontier.level[point])] += 1
            frontier, point = frontier.fewer, int(frontier.came_from[point])
        return {self.kinds[k].kind: tuple(found[k][l] for l in range(len(self.kinds[k].levels))) for k in sorted(found)}
