"""Lower bounds fast: block-coordinate ascent on the dual of the integer program's relaxation.

The objective of autopar/planner/solver/ilp.py is a sum of a cost for every class and one for every hyperedge, which
depends on the layout p that the producer gives and the layouts q that the consumers want: each distinct q is paid for
once. Sequential reweighted message passing (Kolmogorov, "A new look at reweighted message passing", IEEE PAMI 37(5),
2015; on pairs of variables it is TRW-S) visits the classes in order, forward and backward; each collects what its
hyperedges know and hands its own cost on to the hyperedges that reach further. The sum of the minima of all classes and
hyperedges is a lower bound of every plan and never falls. The messages of a hyperedge are in
autopar/planner/solver/factor.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from ..objective.modes import BACKWARD
from ..problem.multipliers import Prices
from ..problem.problem import Problem
from ..problem.vertices import STATE
from .factor import IMPOSSIBLE_SECONDS, End, Factor, Side
from .hyperedges import HyperedgePrices, PricedMode

MOST_CONSUMERS = 4  # of one factor: partitions grow fast; a larger hyperedge is cut into factors that share its cost


def own_cost(problem: Problem, cls: int, prices: Prices, reruns: Collection[int] = ()) -> np.ndarray:
    """Return, for every option of a class, the priced seconds and bytes of all its copies: for its strategies, and, if
    it is one of `reruns`, again for each of them run twice."""
    options, v = problem.classes[cls], problem.vertices[cls]
    weight = (
        prices.compute(v.phase) if v.kind == "op" else 1.0
    )  # communication hides behind compute, not behind the host
    bytes_ = options.resident_bytes + prices.gradients * options.gradient_bytes
    if options.members[0] in problem.made_again:
        weight += prices.compute("backward")
    once = (options.seconds * weight + prices.byte_seconds * bytes_) * options.copies
    if cls not in reruns:
        return once
    return np.concatenate([once, once + options.seconds * (prices.compute("backward") * options.copies)])


def options_of(cls: int, allowed: np.ndarray, reruns: Collection[int]) -> np.ndarray:
    """Return the options of a class whose strategies have the mask `allowed`, see Dual."""
    once = np.flatnonzero(allowed)
    return np.concatenate([once, once + len(allowed)]) if cls in reruns else once


def _order(problem: Problem) -> list[int]:
    """Return the classes in graph order, a leaf just before its first consumer, so that neighbours in the order are
    neighbours in the graph: rounding decides a class when most of what it touches is decided."""
    position = {cls: float(cls) for cls in problem.classes}
    leaves = {cls for cls in problem.classes if not problem.vertices[cls].inputs}
    for cls in leaves:
        consumers = [problem.vertices[u.consumer].cls for u in problem.uses if u.producer == cls and u.slot != STATE]
        position[cls] = min(consumers, default=cls) - 0.5
    return sorted(problem.classes, key=lambda cls: (position[cls], cls))


class Dual:
    """The dual of one problem for given allowed strategies. It may be priced again and again: what it has learned
    stays.

    A class chooses an option: a strategy k of its n, or, if its ops may run again in the backward, n + k, which is
    strategy k run twice. `choice` maps classes to options."""

    def __init__(
        self,
        problem: Problem,
        hyperedges: Sequence[HyperedgePrices],
        allowed: dict[int, np.ndarray],
        prices: Prices,
        keep_parameters: bool | None = None,
        reruns: Collection[int] = (),
        options: Sequence[np.ndarray] | None = None,
        served: dict[HyperedgePrices, list[PricedMode]] | None = None,
    ):
        """Build the dual at these prices. `reruns` are classes whose ops may run again in the backward, so that what
        they make need not be saved; with them the bound also holds for plans that recompute. `options`: those of every
        class in order that are left, by default all that are allowed. `served`: the modes of every hyperedge, if they
        are priced already."""
        self.problem, self.hyperedges, self.allowed, self.keep_parameters = (
            problem,
            hyperedges,
            allowed,
            keep_parameters,
        )
        self.reruns = frozenset(reruns)
        self.classes = _order(problem)
        self.position = {cls: i for i, cls in enumerate(self.classes)}
        self.index = options or [options_of(cls, allowed[cls], self.reruns) for cls in self.classes]
        self.every_factor: list[Factor] = []
        self.factors: list[Factor] = []  # between several classes that have a choice,
        self._absorbed: list[tuple[Factor, list[End]]] = []  # and all others: costs of one class, or of none
        self.ends: list[list[tuple[Factor, End]]] = [[] for _ in self.classes]
        self._loops: list[HyperedgePrices] = []
        for hyperedge in hyperedges:
            parts = -(
                -len(hyperedge.hyperedge.consumers) // MOST_CONSUMERS
            )  # of a hyperedge with many consumers each factor takes a share
            for i in range(parts):
                self._add(hyperedge, range(len(hyperedge.hyperedge.consumers))[i::parts], parts)
        for factor in self.every_factor:
            several = [end for end in (factor.tail, *factor.heads) if len(end.message) > 1]
            if len(several) > 1:
                self.factors.append(factor)
                for end in several:  # one layout alone has nothing to say to its class
                    self.ends[end.position].append((factor, end))
            else:
                self._absorbed.append((factor, several))
        # hyperedges of every class that reach to earlier classes, and to later ones
        self.earlier = [[(f, end) for f, end in ends if f.first < i] for i, ends in enumerate(self.ends)]
        self.later = [[(f, end) for f, end in ends if f.last > i] for i, ends in enumerate(self.ends)]
        self.weights = [1.0 / max(1, len(before), len(after)) for before, after in zip(self.earlier, self.later)]
        self._take(prices, served)

    def _add(self, hyperedge: HyperedgePrices, consumers: Sequence[int], parts: int) -> None:
        sources, tail = self._end(hyperedge.hyperedge.producer, hyperedge.source_of)
        wanted, ends = [], []
        for i in consumers:
            cls = hyperedge.hyperedge.consumers[i][0]
            columns, end = self._end(cls, hyperedge.target_of[i])
            end.phase = hyperedge.phases[i]
            wanted.append(columns)
            ends.append(end)
        if len(ends) == 1 and ends[0].position == tail.position:  # a class that feeds itself: part of its own cost
            self._loops.append(hyperedge)
            return
        universe = np.unique(np.concatenate(wanted))
        for columns, end in zip(wanted, ends):
            end.columns = slice(None) if len(columns) == len(universe) else np.searchsorted(universe, columns)
        factor = Factor(hyperedge, sources, universe, hyperedge.hyperedge.copies / parts, tail, ends)
        self.every_factor.append(factor)

    def _end(self, cls: int, layout_of: np.ndarray) -> tuple[np.ndarray, End]:
        """Return the layouts of a tensor that the allowed options of a class have, with the class's end of a factor."""
        twice, position = cls in self.reruns, self.position[cls]
        rerun, k = np.divmod(self.index[position], len(layout_of))
        layouts, which = np.unique(layout_of[k], return_inverse=True)
        count = len(layouts) * (1 + twice)
        side = Side(which + rerun * len(layouts), count)
        return layouts, End(position, side, np.zeros(count), twice, layouts)

    def restricted(self, keep: Sequence[np.ndarray]) -> Dual:
        """Return the dual of those options of every class alone that a mask keeps, with all that was learned of
        them."""
        few = Dual(
            self.problem,
            self.hyperedges,
            self.allowed,
            self.prices,
            self.keep_parameters,
            self.reruns,
            [index[mask] for index, mask in zip(self.index, keep)],
            self.served,
        )
        learned = {id(mine): known for mine, known in zip(few.every_factor, self.every_factor)}
        for mine in few.factors:
            known = learned[id(mine)]
            for end, other in zip((mine.tail, *mine.heads), (known.tail, *known.heads)):
                if len(end.message) > 1:
                    end.message = other.rows[:, end.places(other)].ravel()
        return few

    def release(self) -> None:
        """Let go of all that is priced. What was learned stays; the next prices, the same ones too, are filled in
        anew."""
        self._is_released = True
        self.served.clear()
        for factor in self.every_factor:
            factor.release()

    def price(self, prices: Prices, served: dict[HyperedgePrices, list[PricedMode]] | None = None) -> None:
        """Take these prices from now on; messages stay, so that the bound is near again after few sweeps. For `served`
        see `__init__`."""
        if self._is_released or prices != self.prices:
            self._take(prices, served)

    def _take(self, prices: Prices, served: dict[HyperedgePrices, list[PricedMode]] | None) -> None:
        self.prices, self._is_released = prices, False
        self.served = served or {h: h.modes(prices, self.keep_parameters, self.reruns) for h in self.hyperedges}
        self.unary = [self.own(cls)[index] for cls, index in zip(self.classes, self.index)]
        for hyperedge in self._loops:
            position = self.position[hyperedge.hyperedge.producer]
            rerun, k = np.divmod(self.index[position], len(hyperedge.source_of))
            p, q, phase = hyperedge.source_of[k], hyperedge.target_of[0][k], hyperedge.phases[0]
            late = (rerun == 1) & (phase != BACKWARD)
            values = [
                m.base[rerun, p] + np.where(late, m.block[phase | BACKWARD][p, q], m.block[phase][p, q])
                for m in self.served[hyperedge]
            ]
            self.unary[position] += np.minimum.reduce(values) * hyperedge.hyperedge.copies
        for factor in self.every_factor:
            factor.price(self.served[factor.hyperedge])
        self._constant = sum(factor.smallest() for factor, several in self._absorbed if not several)
        for factor, (end,) in ((factor, several) for factor, several in self._absorbed if several):
            message = factor.to_tail() if end is factor.tail else factor.to_head(end)
            self.unary[end.position] += end.side.spread(message)

    def own(self, cls: int) -> np.ndarray:
        """Return, for every option of a class, the priced seconds and bytes of all its copies."""
        return own_cost(self.problem, cls, self.prices, self.reruns)

    def strategies(self, choice: dict[int, int]) -> dict[int, int]:
        """Return the strategies of a choice, without what runs again."""
        return {cls: option % len(self.allowed[cls]) for cls, option in choice.items()}

    # ascent

    def _collected(self, i: int) -> np.ndarray:
        theta = self.unary[i].copy()
        for _, end in self.ends[i]:
            theta += end.side.spread(end.message)
        return theta

    def _refresh(self, factor: Factor, end: End) -> None:
        end.message = factor.to_tail() if end is factor.tail else factor.to_head(end)

    def sweep(self, forward: bool) -> None:
        """Make one pass over the classes in order, or against it."""
        incoming, outgoing = (self.earlier, self.later) if forward else (self.later, self.earlier)
        for i in range(len(self.classes)) if forward else range(len(self.classes) - 1, -1, -1):
            for factor, end in incoming[i]:
                self._refresh(factor, end)
            if outgoing[i]:
                theta = self._collected(i)
                theta -= np.minimum.reduce(theta)
                theta *= self.weights[i]
                for _, end in outgoing[i]:
                    end.message = end.message - end.side.smallest(theta)

    def bound(self) -> float:
        """Return the sum of the minima of all classes and hyperedges: no plan costs less."""
        classes = sum(float(self._collected(i).min()) for i in range(len(self.classes)))
        return classes + self._constant + sum(f.smallest() for f in self.factors)

    def reduced_costs(self) -> tuple[float, list[np.ndarray]]:
        """Return the bound, and for every strategy by how much at least the cost lies above it if the strategy is
        taken."""
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
        """Return a choice by class: in order, each the best given the classes before it and what the hyperedges know of
        those after."""
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
