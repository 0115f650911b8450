"""Lower bounds fast: block-coordinate ascent on the dual of the integer program's relaxation.

The objective of autopar/planner/program.py is a sum of a cost for every class and one for every hub, which depends on the
layout p that the producer gives and the layouts q that the consumers want: each distinct q is paid for once. Sequential
reweighted message passing (Kolmogorov, "A new look at reweighted message passing", IEEE PAMI 37(5), 2015; on pairs of variables
it is TRW-S) visits the classes in order, forward and backward; each collects what its hubs know and hands its own cost on to
the hubs that reach further. The sum of the minima of all classes and hubs is a lower bound of every plan and never falls.
The messages of a hub are in autopar/planner/factor.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .again import Again
from .factor import IMPOSSIBLE_SECONDS, End, Factor, Side
from .hubs import HubPrices, Mode
from .prices import Prices
from .problem import Problem
from .vertices import STATE

MOST_CONSUMERS = 4  # of one factor: partitions grow fast; a larger hub is cut into factors that share its cost


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
        self.factors: list[Factor] = []
        self.ends: list[list[tuple[Factor, End]]] = [[] for _ in self.classes]
        self._loops: list[tuple[HubPrices, np.ndarray, np.ndarray]] = []
        for hub in hubs:
            parts = -(-len(hub.hub.consumers) // MOST_CONSUMERS)  # of a hub with many consumers each factor takes a share
            for i in range(parts):
                self._add(hub, range(len(hub.hub.consumers))[i::parts], parts)
        # hubs of every class that reach to earlier classes, and to later ones
        self.earlier = [[(f, end) for f, end in ends if f.first < i] for i, ends in enumerate(self.ends)]
        self.later = [[(f, end) for f, end in ends if f.last > i] for i, ends in enumerate(self.ends)]
        self.weights = [1.0 / max(1, len(before), len(after)) for before, after in zip(self.earlier, self.later)]
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
        tail = End(position, Side(source_of), np.zeros(len(sources)))
        for cls, columns, which, phase in wanted:
            place = slice(None) if len(columns) == len(universe) else np.searchsorted(universe, columns)
            ends.append(End(self.position[cls], Side(which), np.zeros(len(columns)), place, phase))
        factor = Factor(hub, sources, universe, hub.hub.copies / parts, tail, ends)
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
            theta += end.side.spread(end.message)
        return theta

    def _refresh(self, factor: Factor, end: End) -> None:
        end.message = factor.to_tail() if end is factor.tail else factor.to_head(end)

    def sweep(self, forward: bool) -> None:
        """One pass over the classes in order, or against it."""
        known, told = (self.earlier, self.later) if forward else (self.later, self.earlier)
        for i in range(len(self.classes)) if forward else range(len(self.classes) - 1, -1, -1):
            for factor, end in known[i]:
                self._refresh(factor, end)
            if told[i]:
                theta = self._collected(i)
                theta -= np.minimum.reduce(theta)
                theta *= self.weights[i]
                for _, end in told[i]:
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
                theta += end.side.spread(factor.to_tail() if end is factor.tail else factor.to_head(end))
            k = int(theta.argmin())
            chosen[cls] = int(self.index[i][k])
            for _, end in self.ends[i]:  # a decided end says: this layout, no other
                end.message = np.full(len(end.message), -IMPOSSIBLE_SECONDS)
                end.message[end.side.which[k]] = 0.0
        for ends, messages in zip(self.ends, before):
            for (_, end), message in zip(ends, messages):
                end.message = message
        return chosen
