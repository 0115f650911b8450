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
from .shares import IMPOSSIBLE_SECONDS, Shares, cheapest

_least = np.minimum.reduce


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
        self.bit = {id(head): 1 << i for i, head in enumerate(heads)}
        self.phases = {0}  # in which a block of some of the consumers may read
        for head in heads:
            own = {head.phase, head.phase | BACKWARD} if head.twice else {head.phase}
            self.phases |= {phases | mine for phases in self.phases for mine in own}
        self.phases -= {0}
        self.is_once = not any(head.twice for head in heads)  # then a block of consumers reads in one way

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
            self.shares = Shares(self.tail, self.heads, modes, self.width)

    def release(self) -> None:
        """Let go of the prices."""
        self.alone, self.shares = None, Shares(self.tail, self.heads, [], self.width)

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

    def to_tail(self) -> np.ndarray:
        """Return the minimum over the consumers, by the producer's layout."""
        if len(self.heads) == 1:
            return _least(self.alone - self.heads[0].message, axis=1)
        shares = self.shares
        shares.refresh()
        return cheapest([m.base + shares.best(k, shares.everyone) for k, m in enumerate(shares.modes)]).ravel()

    def to_head(self, head: End) -> np.ndarray:
        """Return the minimum over the producer and the other consumers, by this consumer's layout."""
        if len(self.heads) == 1:
            return _least(self.alone - self.tail.message[:, None], axis=0)
        shares = self.shares
        shares.refresh()
        if self.is_once:
            return self._to_head_once(head)
        phases, others = (head.phase, head.phase | BACKWARD)[: 1 + head.twice], shares.everyone ^ self.bit[id(head)]
        rows: list[list[np.ndarray]] = [[] for _ in phases]
        for k in range(len(shares.modes)):
            mask = others
            while True:  # the others that join this consumer's block
                ways = [shares.block(mask).ways(own) for own in phases]
                through = {x: shares.through(k, others ^ mask, x) for x in {x for some in ways for x, _ in some}}
                for row, several in zip(rows, ways):
                    row += [through[x] + added for x, added in several]
                if not mask:
                    break
                mask = (mask - 1) & others
        return np.concatenate([cheapest(row)[head.columns] for row in rows])

    def _to_head_once(self, head: End) -> np.ndarray:
        """Return the same where no consumer may run again."""
        shares, row = self.shares, []
        others = mask = shares.everyone ^ self.bit[id(head)]
        while True:  # the others that join this consumer's block
            block = shares.block(mask)
            phases = head.phase | block.phases
            row += [shares.through(k, others ^ mask, phases) + block.once for k in range(len(shares.modes))]
            if not mask:
                return cheapest(row)[head.columns]
            mask = (mask - 1) & others

    def smallest(self) -> float:
        """Return the minimum over all layouts, less the messages that the factor has sent."""
        return float((self.to_tail() - self.tail.message).min())
