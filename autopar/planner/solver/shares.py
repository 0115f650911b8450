"""Keep what sets of a tensor's consumers pay where they share the cost of a layout, while nobody's message changes.

A set of consumers is a bit mask. Between two refreshes of a factor's messages mostly one of them is new, so that what
the sets without it pay is known (autopar/planner/solver/factor.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..objective.modes import BACKWARD
from .hyperedges import PricedMode

if TYPE_CHECKING:
    from .factor import End

IMPOSSIBLE_SECONDS = 1e4  # in place of infinity, which messages could not be subtracted from
_least = np.minimum.reduce


def cheapest(values: list[np.ndarray]) -> np.ndarray:
    """Return the minimum of several arrays of one shape."""
    return values[0] if len(values) == 1 else _least(values)


class Block:
    """Consumers that take the same layout: the phases in which they read, what they add by column, and what they add at
    least where one of them may run again (else None)."""

    def __init__(self, phases: int = 0, once: np.ndarray | float = 0.0, least: np.ndarray | float | None = None):
        self.phases, self.once, self.least = phases, once, least

    def joined(self, other: Block) -> Block:
        """Return the block of the consumers of both."""
        if self.least is None and other.least is None:
            return Block(self.phases | other.phases, self.once + other.once)
        least = (self.once if self.least is None else self.least) + (other.once if other.least is None else other.least)
        return Block(self.phases | other.phases, self.once + other.once, least)

    def ways(self, phases: int = 0) -> list[tuple[int, np.ndarray | float]]:
        """Return in which phases the block may read, with one more consumer that reads in `phases`, and what its
        consumers add by column in each case."""
        phases |= self.phases
        if self.least is None:
            return [(phases, self.once)]
        late = (phases | BACKWARD, self.least)
        return [late] if phases & BACKWARD else [(phases, self.once), late]


class Shares:
    """The payments of all sets of a factor's consumers at its prices, with the messages that the factor sends now."""

    def __init__(self, tail: End, heads: Sequence[End], modes: Sequence[PricedMode], width: int):
        self.tail, self.heads, self.modes, self.width = tail, heads, modes, width
        self.everyone = (1 << len(heads)) - 1
        self._read: list[np.ndarray | None] = [None] * len(heads)  # the messages that sets are known for
        self._blocks = {0: Block()}
        self._alone: list[dict[int, np.ndarray]] = [{} for _ in modes]
        self._best = [{0: np.zeros(mode.base.shape[1])} for mode in modes]
        self._read_tail: np.ndarray | None = None
        self._before: list[np.ndarray] = []
        self._through: list[dict[int, dict[int, np.ndarray]]] = []
        self._stale: dict[int, list[int]] = {}  # by what has changed, the sets that have some of it

    def refresh(self) -> None:
        """Forget what depends on messages that were sent anew; they are replaced, not changed in place."""
        changed = 0
        for i, head in enumerate(self.heads):
            if head.message is not self._read[i]:
                self._read[i] = head.message
                changed |= 1 << i
        if changed:
            if (stale := self._stale.get(changed)) is None:
                stale = self._stale[changed] = [mask for mask in range(1, self.everyone + 1) if mask & changed]
            every: list[dict[int, Any]] = [self._blocks, *self._alone, *self._best, *self._through]
            for known in every:
                for mask in stale:
                    known.pop(mask, None)
        if self.tail.message is not self._read_tail:
            self._read_tail = self.tail.message
            self._before = [_least(mode.base - self.tail.rows) for mode in self.modes]
            self._through = [{} for _ in self.modes]

    def block(self, mask: int) -> Block:
        """Return the block that a set forms."""
        if mask not in self._blocks:
            last = 1 << (mask.bit_length() - 1)
            one = self._single(self.heads[last.bit_length() - 1]) if mask == last else self.block(last)
            self._blocks[mask] = one if mask == last else self.block(mask ^ last).joined(one)
        return self._blocks[mask]

    def _single(self, head: End) -> Block:
        """Return the block of a consumer alone; it is impossible where the consumer does not want the column."""
        added = np.full((1 + head.twice, self.width), IMPOSSIBLE_SECONDS)
        added[:, head.columns] = -head.rows
        return Block(head.phase, added[0], _least(added) if head.twice else None)

    def alone(self, k: int, mask: int) -> np.ndarray:
        """Return what a set that takes one layout costs in mode `k`, by the producer's layout."""
        known = self._alone[k]
        if mask not in known:
            block = self.modes[k].block
            known[mask] = cheapest([_least(block[x] + added, axis=1) for x, added in self.block(mask).ways()])
        return known[mask]

    def best(self, k: int, mask: int) -> np.ndarray:
        """Return the minimum over all ways in which the consumers of a set share payments in mode `k`, by the
        producer's layout."""
        known = self._best[k]
        if mask not in known:
            lowest = mask & -mask
            rest, result = mask ^ lowest, self.alone(k, mask)
            sub = rest
            while sub:  # blocks that hold the first consumer of the set, but not all
                sub = (sub - 1) & rest
                result = np.minimum(result, self.alone(k, sub | lowest) + self.best(k, rest ^ sub))
            known[mask] = result
        return known[mask]

    def through(self, k: int, rest: int, phases: int) -> np.ndarray:
        """Return what the producer, consumers of other layouts (the set `rest`) and a block that reads in `phases` cost
        in mode `k`, without what the block's consumers add, by its column."""
        known = self._through[k].get(rest)
        if known is None:
            known = self._through[k][rest] = {}
        if phases not in known:
            block, before = self.modes[k].block[phases], self._before[k]
            known[phases] = _least(block + (before + self.best(k, rest) if rest else before)[:, None])
        return known[phases]
