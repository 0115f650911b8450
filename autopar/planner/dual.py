"""Lower bounds fast: block-coordinate ascent on the dual of the integer program's relaxation.

The objective of autopar/planner/program.py is a sum of a cost for every class and one for every hub, which depends on the
layout p that the producer gives and the layouts q that the consumers want: each distinct q is paid for once. Sequential
reweighted message passing (Kolmogorov, "A new look at reweighted message passing", IEEE PAMI 37(5), 2015; on pairs of variables
it is TRW-S) visits the classes in order, forward and backward; each collects what its hubs know and hands its own cost on to
the hubs that reach further. The sum of the minima of all classes and hubs is a lower bound of every plan and never falls.

A hub with n consumers is minimized exactly over all ways of sharing payments: for fixed p, consumers that take the same q form
a block, so the minimum is over partitions of the consumers into blocks, min_q (cost(p, q) + what the block's consumers add).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .again import Again
from .hubs import FORWARD, HubPrices, Mode
from .prices import Prices
from .problem import Problem
from .vertices import STATE

IMPOSSIBLE_SECONDS = 1e4  # in place of infinity, which messages could not be subtracted from
MOST_CONSUMERS = 4  # of one factor: partitions grow fast; a larger hub is cut into factors that share its cost


class _Side:
    """How the strategies of a class map to layouts of one tensor."""

    def __init__(self, which: np.ndarray):
        self.which = which
        self.order = np.argsort(which, kind="stable")
        self.starts = np.searchsorted(which[self.order], np.arange(which.max() + 1))

    def smallest(self, values: np.ndarray) -> np.ndarray:
        """Minimum of a class's values over the strategies of each layout."""
        return np.minimum.reduceat(values[self.order], self.starts)


@dataclass
class _End:
    """One variable of a factor: the class at `position` and the message that the factor sends it, by layout."""

    position: int
    side: _Side
    message: np.ndarray
    columns: np.ndarray | slice | None = None  # a consumer's layouts as columns of the factor's prices
    phase: int = FORWARD


class _Factor:
    """The payments of a hub with one producer and a few consumers: the cheapest of its modes."""

    def __init__(self, hub: HubPrices, sources: np.ndarray, universe: np.ndarray, scale: float, tail: _End, heads: list[_End]):
        self.hub, self.sources, self.universe, self.scale, self.tail, self.heads = hub, sources, universe, scale, tail, heads
        self.width = len(universe)
        positions = [tail.position, *(h.position for h in heads)]
        self.first, self.last = min(positions), max(positions)

    def price(self, modes: list[Mode]) -> None:
        """Take over the part of a hub's prices that is allowed, times its share of the copies."""
        place = np.ix_(self.sources, self.universe)
        self.modes = [
            Mode(
                np.minimum(mode.base[self.sources] * self.scale, IMPOSSIBLE_SECONDS),
                {phase: np.minimum(price[place] * self.scale, IMPOSSIBLE_SECONDS) for phase, price in mode.block.items()},
            )
            for mode in modes
        ]

    def _added(self, head: _End) -> np.ndarray:
        """What a consumer adds, by column; impossible where it does not want the column."""
        added = np.full(self.width, IMPOSSIBLE_SECONDS)
        added[head.columns] = -head.message
        return added

    def _partitions(self, mode: Mode, heads: list[_End], added: list[np.ndarray]) -> dict[int, np.ndarray]:
        """For every set of these consumers (a bit mask), by p, the minimum over all ways in which they share payments."""
        count = len(heads)
        best = {0: np.zeros(len(mode.base))}
        if count == 1:
            best[1] = (mode.block[heads[0].phase][:, heads[0].columns] - heads[0].message).min(1)
            return best
        block = {}
        for mask in range(1, 1 << count):
            members = [i for i in range(count) if mask >> i & 1]
            phases = 0
            for i in members:
                phases |= heads[i].phase
            block[mask] = (mode.block[phases] + sum(added[i] for i in members)).min(1)
        for mask in range(1, 1 << count):
            lowest = mask & -mask
            rest, sub, result = mask ^ lowest, mask ^ lowest, None
            while True:  # blocks that hold the first consumer of the mask
                value = block[sub | lowest] + best[rest ^ sub]
                result = value if result is None else np.minimum(result, value)
                if not sub:
                    break
                sub = (sub - 1) & rest
            best[mask] = result
        return best

    def to_tail(self) -> np.ndarray:
        """Minimum over the consumers, by the producer's layout."""
        added = [self._added(h) for h in self.heads] if len(self.heads) > 1 else []
        everyone = (1 << len(self.heads)) - 1
        values = [m.base + self._partitions(m, self.heads, added)[everyone] for m in self.modes]
        return values[0] if len(values) == 1 else np.minimum.reduce(values)

    def to_head(self, head: _End) -> np.ndarray:
        """Minimum over the producer and the other consumers, by this consumer's layout."""
        others = [h for h in self.heads if h is not head]
        added = [self._added(o) for o in others]
        everyone, result = (1 << len(others)) - 1, None
        for mode in self.modes:
            before = mode.base - self.tail.message
            best = self._partitions(mode, others, added) if others else {0: np.zeros(len(before))}
            for mask in range(1 << len(others)):  # the others that join this consumer's block
                phases, joined = head.phase, 0.0
                for i, other in enumerate(others):
                    if mask >> i & 1:
                        phases, joined = phases | other.phase, joined + added[i][head.columns]
                value = (mode.block[phases][:, head.columns] + (before + best[everyone ^ mask])[:, None]).min(0) + joined
                result = value if result is None else np.minimum(result, value)
        return result

    def smallest(self) -> float:
        return float((self.to_tail() - self.tail.message).min())


def own_cost(problem: Problem, cls: int, prices: Prices) -> np.ndarray:
    """Of every strategy of a class: the priced seconds and bytes of all its copies."""
    options, v = problem.classes[cls], problem.vertices[cls]
    weight = prices.compute(v.phase) if v.kind == "op" else 1.0  # communication hides behind compute, not behind the host
    bytes_ = options.resident_bytes + prices.gradients * options.gradient_bytes
    return (options.seconds * weight + prices.byte_seconds * bytes_) * options.copies


def _order(problem: Problem) -> list[int]:
    """Classes in graph order, a leaf just before its first consumer, so that neighbours in the order are neighbours in the
    graph: rounding decides a class when most of what it touches is decided."""
    place = {cls: float(cls) for cls in problem.classes}
    leaves = {cls for cls in problem.classes if not problem.vertices[cls].inputs}
    for cls in leaves:
        consumers = [problem.vertices[u.consumer].cls for u in problem.uses if u.producer == cls and u.slot != STATE]
        place[cls] = min(consumers, default=cls) - 0.5
    return sorted(problem.classes, key=lambda cls: (place[cls], cls))


class Dual:
    """The dual of one problem for given allowed strategies. It may be priced again and again: what it has learned stays."""

    def __init__(self, problem: Problem, hubs: Sequence[HubPrices], allowed: dict[int, np.ndarray], prices: Prices,
                 keep_parameters: bool | None = None, again: Again | None = None):  # fmt: skip
        """`again`: what values cost that may be made again in the backward instead of saved; with it the bound also holds for
        plans that recompute."""
        self.problem, self.hubs, self.allowed, self.keep_parameters = problem, hubs, allowed, keep_parameters
        self.again = again
        self.classes = _order(problem)
        self.position = {cls: i for i, cls in enumerate(self.classes)}
        self.index = [np.flatnonzero(allowed[cls]) for cls in self.classes]
        self.factors: list[_Factor] = []
        self.ends: list[list[tuple[_Factor, _End]]] = [[] for _ in self.classes]
        self._loops: list[tuple[HubPrices, np.ndarray, np.ndarray]] = []
        for hub in hubs:
            parts = -(-len(hub.hub.consumers) // MOST_CONSUMERS)  # of a hub with many consumers each factor takes a share
            for i in range(parts):
                self._add(hub, range(len(hub.hub.consumers))[i::parts], parts)
        self.weights = []
        for i, ends in enumerate(self.ends):
            earlier, later = sum(f.first < i for f, _ in ends), sum(f.last > i for f, _ in ends)
            self.weights.append(1.0 / max(1, earlier, later))
        self.price(prices)

    def _add(self, hub: HubPrices, consumers: Sequence[int], parts: int) -> None:
        position = self.position[hub.hub.producer]
        sources, source_of = np.unique(hub.source_of[self.index[position]], return_inverse=True)
        wanted, ends = [], []
        for i in consumers:
            cls = hub.hub.consumers[i][0]
            columns, which = np.unique(hub.target_of[i][self.index[self.position[cls]]], return_inverse=True)
            wanted.append((cls, columns, which, hub.phases[i]))
        if len(wanted) == 1 and wanted[0][0] == hub.hub.producer:  # a class that feeds itself: part of its own cost
            self._loops.append((hub, hub.source_of[self.index[position]], hub.target_of[0][self.index[position]]))
            return
        universe = np.unique(np.concatenate([columns for _, columns, _, _ in wanted]))
        tail = _End(position, _Side(source_of), np.zeros(len(sources)))
        for cls, columns, which, phase in wanted:
            place = slice(None) if len(columns) == len(universe) else np.searchsorted(universe, columns)
            ends.append(_End(self.position[cls], _Side(which), np.zeros(len(columns)), place, phase))
        factor = _Factor(hub, sources, universe, hub.hub.copies / parts, tail, ends)
        self.factors.append(factor)
        for end in (tail, *ends):
            self.ends[end.position].append((factor, end))

    def price(self, prices: Prices) -> None:
        """Take these prices from now on; messages stay, so that the bound is near again after few sweeps."""
        self.prices = prices
        self.unary = [own_cost(self.problem, cls, prices)[index] for cls, index in zip(self.classes, self.index)]
        for hub, source_of, target_of in self._loops:
            modes = self.modes(hub)
            values = [m.base[source_of] + m.block[hub.phases[0]][source_of, target_of] for m in modes]
            self.unary[self.position[hub.hub.producer]] += np.minimum.reduce(values) * hub.hub.copies
        priced = {}
        for factor in self.factors:
            if id(factor.hub) not in priced:
                priced[id(factor.hub)] = self.modes(factor.hub)
            factor.price(priced[id(factor.hub)])

    def modes(self, hub: HubPrices) -> list[Mode]:
        """The ways to serve one copy of a hub at the prices of the dual."""
        again = self.again.seconds(hub, self.prices) if self.again else None
        return hub.modes(self.prices, self.keep_parameters, again)

    # ascent

    def _collected(self, i: int) -> np.ndarray:
        theta = self.unary[i].copy()
        for _, end in self.ends[i]:
            theta += end.message[end.side.which]
        return theta

    def _refresh(self, factor: _Factor, end: _End) -> None:
        end.message = factor.to_tail() if end is factor.tail else factor.to_head(end)

    def sweep(self, forward: bool) -> None:
        """One pass over the classes in order, or against it."""
        for i in range(len(self.classes)) if forward else range(len(self.classes) - 1, -1, -1):
            ends = self.ends[i]
            for factor, end in ends:
                if (factor.first < i) if forward else (factor.last > i):
                    self._refresh(factor, end)
            theta = self._collected(i)
            theta = (theta - theta.min()) * self.weights[i]
            for factor, end in ends:
                if (factor.last > i) if forward else (factor.first < i):
                    end.message = end.message - end.side.smallest(theta)

    def bound(self) -> float:
        """Sum of the minima of all classes and hubs: no plan costs less."""
        return sum(float(self._collected(i).min()) for i in range(len(self.classes))) + sum(
            f.smallest() for f in self.factors
        )

    def reduced_costs(self) -> tuple[float, list[np.ndarray]]:
        """The bound, and for every strategy how far it lies above it at least if the strategy is taken."""
        reduced = []
        for i in range(len(self.classes)):
            for factor, end in self.ends[i]:
                self._refresh(factor, end)
            theta = self._collected(i)
            reduced.append(theta - theta.min())
            share = 1.0 / (len(self.ends[i]) + 1)
            for _, end in self.ends[i]:
                end.message = end.message - end.side.smallest((theta - theta.min()) * share)
        return self.bound(), reduced

    def round(self) -> dict[int, int]:
        """A choice by class: in order, each the best given the classes before it and what the hubs know of those after."""
        before = [[end.message for _, end in ends] for ends in self.ends]
        chosen: dict[int, int] = {}
        for i, cls in enumerate(self.classes):
            theta = self.unary[i].copy()
            for factor, end in self.ends[i]:
                theta += (factor.to_tail() if end is factor.tail else factor.to_head(end))[end.side.which]
            k = int(theta.argmin())
            chosen[cls] = int(self.index[i][k])
            for _, end in self.ends[i]:  # a decided end says: this layout, no other
                end.message = np.full(len(end.message), -IMPOSSIBLE_SECONDS)
                end.message[end.side.which[k]] = 0.0
        for ends, messages in zip(self.ends, before):
            for (_, end), message in zip(ends, messages):
                end.message = message
        return chosen
