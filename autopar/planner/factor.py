"""The payments of a hub in the dual, minimized exactly over the layouts of its consumers.

A hub with n consumers is minimized over all ways of sharing payments: for a fixed layout p of the producer, consumers that take
the same q form a block, so the minimum is over partitions of the consumers into blocks, min_q (cost(p, q) + what the block's
consumers add). Sweeps call these functions hundreds of thousands of times on small arrays: they spare calls, not flops.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .hubs import FORWARD, HubPrices, Mode

IMPOSSIBLE_SECONDS = 1e4  # in place of infinity, which messages could not be subtracted from
_least = np.minimum.reduce


class Side:
    """How the strategies of a class map to layouts of one tensor."""

    def __init__(self, which: np.ndarray):
        self.which = which
        self.order = np.argsort(which, kind="stable")
        self.starts = np.searchsorted(which[self.order], np.arange(which.max() + 1))
        self.is_identity = len(self.starts) == len(which) and bool((which == np.arange(len(which))).all())

    def smallest(self, values: np.ndarray) -> np.ndarray:
        """Minimum of a class's values over the strategies of each layout."""
        return values if self.is_identity else np.minimum.reduceat(values.take(self.order), self.starts)

    def spread(self, message: np.ndarray) -> np.ndarray:
        """A message by layout as one by strategy."""
        return message if self.is_identity else message.take(self.which)


@dataclass(eq=False)
class End:
    """One variable of a factor: the class at `position` and the message that the factor sends it, by layout."""

    position: int
    side: Side
    message: np.ndarray
    columns: np.ndarray | slice | None = None  # a consumer's layouts as columns of the factor's prices
    phase: int = FORWARD


class Factor:
    """The payments of a hub with one producer and a few consumers: the cheapest of its modes."""

    def __init__(self, hub: HubPrices, sources: np.ndarray, universe: np.ndarray, scale: float, tail: End, heads: list[End]):
        self.hub, self.sources, self.universe, self.scale, self.tail, self.heads = hub, sources, universe, scale, tail, heads
        self.width = len(universe)
        positions = [tail.position, *(h.position for h in heads)]
        self.first, self.last = min(positions), max(positions)
        self.others = {id(head): [h for h in heads if h is not head] for head in heads}

    def price(self, modes: list[Mode]) -> None:
        """Take over the part of a hub's prices that is allowed, times its share of the copies."""
        place = np.ix_(self.sources, self.universe)
        modes = [
            Mode(
                np.minimum(mode.base[self.sources] * self.scale, IMPOSSIBLE_SECONDS),
                {phase: np.minimum(price[place] * self.scale, IMPOSSIBLE_SECONDS) for phase, price in mode.block.items()},
            )
            for mode in modes
        ]
        if len(self.heads) == 1:  # nothing to share: one matrix says all
            phase = self.heads[0].phase
            self.alone = _least([m.base[:, None] + m.block[phase] for m in modes])
        else:
            self.modes = modes

    def _added(self, head: End) -> np.ndarray:
        """What a consumer adds, by column; impossible where it does not want the column."""
        if isinstance(head.columns, slice):
            return -head.message
        added = np.full(self.width, IMPOSSIBLE_SECONDS)
        added[head.columns] = -head.message
        return added

    def _partitions(self, mode: Mode, heads: list[End], added: list[np.ndarray]) -> list[np.ndarray]:
        """For every set of these consumers (a bit mask), by p, the minimum over all ways in which they share payments."""
        best = [np.zeros(len(mode.base))]
        if len(heads) == 1:
            best.append(_least(mode.block[heads[0].phase] + added[0], axis=1))
            return best
        phases, sums, block = [0], [None], [None]
        for mask in range(1, 1 << len(heads)):
            i = mask.bit_length() - 1
            rest = mask ^ 1 << i
            phases.append(phases[rest] | heads[i].phase)
            sums.append(sums[rest] + added[i] if rest else added[i])
            block.append(_least(mode.block[phases[mask]] + sums[mask], axis=1))
        for mask in range(1, 1 << len(heads)):
            lowest = mask & -mask
            rest, sub, result = mask ^ lowest, mask ^ lowest, None
            while True:  # blocks that hold the first consumer of the mask
                value = block[sub | lowest] + best[rest ^ sub] if rest ^ sub else block[mask]
                result = value if result is None else np.minimum(result, value)
                if not sub:
                    break
                sub = (sub - 1) & rest
            best.append(result)
        return best

    def to_tail(self) -> np.ndarray:
        """Minimum over the consumers, by the producer's layout."""
        if len(self.heads) == 1:
            return _least(self.alone - self.heads[0].message, axis=1)
        added = [self._added(h) for h in self.heads]
        values = [m.base + self._partitions(m, self.heads, added)[-1] for m in self.modes]
        return values[0] if len(values) == 1 else _least(values)

    def to_head(self, head: End) -> np.ndarray:
        """Minimum over the producer and the other consumers, by this consumer's layout."""
        if len(self.heads) == 1:
            return _least(self.alone - self.tail.message[:, None], axis=0)
        others, columns, result = self.others[id(head)], head.columns, None
        added = [self._added(o) for o in others]
        everyone = (1 << len(others)) - 1
        for mode in self.modes:
            before = mode.base - self.tail.message
            best = self._partitions(mode, others, added)
            for mask in range(1 << len(others)):  # the others that join this consumer's block
                phases, joined = head.phase, None
                for i, other in enumerate(others):
                    if mask >> i & 1:
                        phases, joined = phases | other.phase, added[i] if joined is None else joined + added[i]
                start = before + best[everyone ^ mask] if mask != everyone else before
                value = _least(mode.block[phases] + start[:, None], axis=0)
                value = value if joined is None else value + joined
                result = value if result is None else np.minimum(result, value)
        return result[columns]

    def smallest(self) -> float:
        return float((self.to_tail() - self.tail.message).min())
