"""The payments of a hyperedge in the dual, minimized exactly over the layouts of its consumers.

A hyperedge with n consumers is minimized over all ways of sharing payments: for a fixed layout p of the producer,
consumers that take the same q form a block, so the minimum is over partitions of the consumers into blocks, min_q
(cost(p, q) + what the block's consumers add). A producer that may run again has its layouts twice, once as it runs
once; so has a forward consumer that may run again, which then reads in both phases.

Sweeps call these functions hundreds of thousands of times on small arrays: they spare calls, not flops.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..objective.modes import BACKWARD, BOTH, FORWARD
from .hyperedges import HyperedgePrices, PricedMode

IMPOSSIBLE_SECONDS = 1e4  # in place of infinity, which messages could not be subtracted from
_least = np.minimum.reduce


def _cheapest(values: list[np.ndarray]) -> np.ndarray:
    """Return the minimum of several arrays of one shape."""
    return values[0] if len(values) == 1 else _least(values)


class Side:
    """The map from the options of a class to `count` layouts of one tensor, some of which may have no option."""

    def __init__(self, which: np.ndarray, count: int):
        self.which, self.count = which, count
        self.order = np.argsort(which, kind="stable")
        present = np.unique(which)
        self.starts = np.searchsorted(which[self.order], present)
        self.present = present if len(present) < count else None
        self.is_identity = count == len(which) and bool((which == np.arange(count)).all())

    def smallest(self, values: np.ndarray) -> np.ndarray:
        """Return the minimum of a class's values over the options of each layout."""
        if self.is_identity:
            return values
        least = np.minimum.reduceat(values.take(self.order), self.starts)
        if self.present is None:
            return least
        every = np.full(self.count, IMPOSSIBLE_SECONDS)
        every[self.present] = least
        return every

    def spread(self, message: np.ndarray) -> np.ndarray:
        """Return a message by layout as one by option."""
        return message if self.is_identity else message.take(self.which)


@dataclass(eq=False)
class End:
    """One variable of a factor: the class at `position` and the message that the factor sends it, by layout; if it may
    run again (`twice`) by layout as it runs once, then by layout as it runs again."""

    position: int
    side: Side
    message: np.ndarray
    twice: bool
    layouts: np.ndarray
    columns: np.ndarray | slice | None = None  # a consumer's layouts as columns of the factor's prices
    phase: int = FORWARD

    @property
    def rows(self) -> np.ndarray:
        """Return the message in one row, or in two if the class may run again."""
        return self.message.reshape(1 + self.twice, -1)

    def places(self, other: End) -> np.ndarray:
        """Return where the layouts are among those of an end of the same class that has more."""
        return np.searchsorted(other.layouts, self.layouts)


class _Block:
    """Consumers that take the same layout: the phases in which they read, what they add by column, and what they add at
    least where one of them may run again (else None)."""

    def __init__(self, phases: int = 0, once: np.ndarray | float = 0.0, least: np.ndarray | float | None = None):
        self.phases, self.once, self.least = phases, once, least

    def joined(self, other: _Block) -> _Block:
        """Return the block of the consumers of both."""
        if self.least is None and other.least is None:
            return _Block(self.phases | other.phases, self.once + other.once)
        least = (self.once if self.least is None else self.least) + (other.once if other.least is None else other.least)
        return _Block(self.phases | other.phases, self.once + other.once, least)

    def ways(self, phases: int = 0) -> list[tuple[int, np.ndarray | float]]:
        """Return in which phases the block may read, with one more consumer that reads in `phases`, and what its
        consumers add by column in each case."""
        phases |= self.phases
        if self.least is None:
            return [(phases, self.once)]
        late = (phases | BACKWARD, self.least)
        return [late] if phases & BACKWARD else [(phases, self.once), late]


class Factor:
    """The payments of a hyperedge with one producer and a few consumers: the cheapest of its modes."""

    def __init__(
        self,
        hyperedge: HyperedgePrices,
        sources: np.ndarray,
        universe: np.ndarray,
        scale: float,
        tail: End,
        heads: list[End],
    ):
        self.hyperedge, self.sources, self.universe, self.scale, self.tail, self.heads = (
            hyperedge,
            sources,
            universe,
            scale,
            tail,
            heads,
        )
        self.width = len(universe)
        positions = [tail.position, *(h.position for h in heads)]
        self.first, self.last = min(positions), max(positions)
        self.others = {id(head): [h for h in heads if h is not head] for head in heads}
        self.phases = {0}  # in which a block of some of the consumers may read
        for head in heads:
            own = {head.phase, head.phase | BACKWARD} if head.twice else {head.phase}
            self.phases |= {phases | mine for phases in self.phases for mine in own}
        self.phases -= {0}

    def price(self, modes: list[PricedMode]) -> None:
        """Take over the part of a hyperedge's prices that is allowed, times its share of the copies. Where others of
        the hyperedge's consumers are in other factors, a block costs no more than with these: what both phases read may
        be cheaper than what one does."""
        rows = np.ix_(np.arange(1 + self.tail.twice), self.sources)
        modes = [
            PricedMode(
                np.minimum(mode.base[rows] * self.scale, IMPOSSIBLE_SECONDS),
                {phases: self._part(mode, phases) for phases in self.phases},
            )
            for mode in modes
        ]
        if len(self.heads) == 1:  # nothing to share: one matrix says all
            self.alone = _least([self._alone(mode, self.heads[0]) for mode in modes])
        else:
            self.modes = modes

    def release(self) -> None:
        """Let go of the prices."""
        self.alone, self.modes = None, []

    def _part(self, mode: PricedMode, phases: int) -> np.ndarray:
        """Return what a block that reads in these phases pays, by the factor's own layouts."""
        grid = np.ix_(self.sources, self.universe)
        price = mode.block[phases][grid]
        if len(self.heads) < len(self.hyperedge.hyperedge.consumers):
            price = np.minimum(price, mode.block[BOTH][grid])
        return np.minimum(price * self.scale, IMPOSSIBLE_SECONDS)

    def _alone(self, mode: PricedMode, head: End) -> np.ndarray:
        """Return what the only consumer costs, by the producer's layouts and its own, either twice if it may run
        again."""
        phases = (head.phase, head.phase | BACKWARD)[: 1 + head.twice]
        columns = np.hstack([mode.block[x] for x in phases])
        return np.vstack([base[:, None] + columns for base in mode.base])

    def _block(self, head: End) -> _Block:
        """Return the block of a consumer alone; it is impossible where the consumer does not want the column."""
        added = np.full((1 + head.twice, self.width), IMPOSSIBLE_SECONDS)
        added[:, head.columns] = -head.rows
        return _Block(head.phase, added[0], _least(added) if head.twice else None)

    def _blocks(self, heads: list[End]) -> list[_Block]:
        """Return, for every set of these consumers (a bit mask), the block that they form."""
        blocks = [_Block()]
        for i, head in enumerate(heads):
            one = self._block(head)
            blocks += [one, *(blocks[rest].joined(one) for rest in range(1, 1 << i))]
        return blocks

    def _partitions(self, mode: PricedMode, blocks: list[_Block]) -> list[np.ndarray]:
        """Return, for every set of consumers, by p, the minimum over all ways in which they share payments."""
        best = [np.zeros(len(self.sources))]
        alone: list = [None]
        for block in blocks[1:]:
            alone.append(_cheapest([_least(mode.block[x] + added, axis=1) for x, added in block.ways()]))
        for mask in range(1, len(blocks)):
            lowest = mask & -mask
            rest, result = mask ^ lowest, alone[mask]
            sub = rest
            while sub:  # blocks that hold the first consumer of the set, but not all
                sub = (sub - 1) & rest
                result = np.minimum(result, alone[sub | lowest] + best[rest ^ sub])
            best.append(result)
        return best

    def to_tail(self) -> np.ndarray:
        """Return the minimum over the consumers, by the producer's layout."""
        if len(self.heads) == 1:
            return _least(self.alone - self.heads[0].message, axis=1)
        blocks = self._blocks(self.heads)
        values = [m.base + self._partitions(m, blocks)[-1] for m in self.modes]
        return _cheapest(values).ravel()

    def to_head(self, head: End) -> np.ndarray:
        """Return the minimum over the producer and the other consumers, by this consumer's layout."""
        if len(self.heads) == 1:
            return _least(self.alone - self.tail.message[:, None], axis=0)
        blocks = self._blocks(self.others[id(head)])
        phases = (head.phase, head.phase | BACKWARD)[: 1 + head.twice]
        everyone = len(blocks) - 1
        rows: list[list[np.ndarray]] = [[] for _ in phases]
        for mode in self.modes:
            before, best = _least(mode.base - self.tail.rows), self._partitions(mode, blocks)
            for mask, block in enumerate(blocks):  # the others that join this consumer's block
                start = (before + best[everyone ^ mask] if mask != everyone else before)[:, None]
                ways = [block.ways(own) for own in phases]
                through = {x: _least(mode.block[x] + start) for x in {x for several in ways for x, _ in several}}
                for row, several in zip(rows, ways):
                    row += [through[x] + added for x, added in several]
        return np.concatenate([_cheapest(row)[head.columns] for row in rows])

    def smallest(self) -> float:
        """Return the minimum over all layouts, less the messages that the factor has sent."""
        return float((self.to_tail() - self.tail.message).min())
