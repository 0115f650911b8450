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

from dataclasses import dataclass

import numpy as np

from .evaluate import RESIDENT_LEAVES, Pricer
from .problem import STATE, Problem
from .program import Hub, hubs_of

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
    columns: np.ndarray | None = None  # a consumer's layouts as columns of the factor's cost


class _Factor:
    """The payments of a hub: cost (p, column), one producer, a few consumers."""

    def __init__(self, cost: np.ndarray, tail: _End, heads: list[_End]):
        self.cost, self.tail, self.heads = cost, tail, heads
        positions = [tail.position, *(h.position for h in heads)]
        self.first, self.last = min(positions), max(positions)

    def _added(self, head: _End) -> np.ndarray:
        """What a consumer adds, by column; impossible where it does not want the column."""
        added = np.full(self.cost.shape[1], IMPOSSIBLE_SECONDS)
        added[head.columns] = -head.message
        return added

    def _partitions(self, heads: list[_End]) -> np.ndarray:
        """For every p the minimum over all ways in which these consumers share payments."""
        if len(heads) == 1:
            head = heads[0]
            return (self.cost[:, head.columns] - head.message).min(1)
        added = [self._added(h) for h in heads]
        count = len(heads)
        block = {}
        for mask in range(1, 1 << count):
            total = sum(added[i] for i in range(count) if mask >> i & 1)
            block[mask] = (self.cost + total).min(1)
        best = {0: np.zeros(self.cost.shape[0])}
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
        self._best_of = best
        return best[(1 << count) - 1]

    def to_tail(self) -> np.ndarray:
        """Minimum over the consumers, by the producer's layout."""
        return self._partitions(self.heads)

    def to_head(self, head: _End) -> np.ndarray:
        """Minimum over the producer and the other consumers, by this consumer's layout."""
        base = self.cost[:, head.columns] - self.tail.message[:, None]
        others = [h for h in self.heads if h is not head]
        if not others:
            return base.min(0)
        self._partitions(others)
        best = self._best_of if len(others) > 1 else {0: np.zeros(len(base)), 1: self._partitions(others)}
        added = [self._added(o)[head.columns] for o in others]
        everyone, result = (1 << len(others)) - 1, None
        for mask in range(1 << len(others)):  # the others that join this consumer's block
            joined = sum((added[i] for i in range(len(others)) if mask >> i & 1), np.zeros(len(head.columns)))
            value = (base + best[everyone ^ mask][:, None]).min(0) + joined
            result = value if result is None else np.minimum(result, value)
        return result

    def smallest(self) -> float:
        return float((self.to_tail() - self.tail.message).min())


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
    """The dual of one problem for given allowed strategies and price of memory."""

    def __init__(self, problem: Problem, pricer: Pricer, allowed: dict[int, np.ndarray], byte_price: float = 0.0,
                 price_saved: bool = False, keep_parameters: bool | None = None):  # fmt: skip
        self.problem, self.pricer, self.allowed = problem, pricer, allowed
        self.byte_price, self.price_saved, self.keep_parameters = byte_price, price_saved, keep_parameters
        self.classes = _order(problem)
        self.position = {cls: i for i, cls in enumerate(self.classes)}
        self.index = [np.flatnonzero(allowed[cls]) for cls in self.classes]
        self.unary = []
        for cls, index in zip(self.classes, self.index):
            options = problem.classes[cls]
            price = options.seconds[index] + byte_price * options.resident_bytes[index]
            self.unary.append(price * len(options.members))
        self.factors: list[_Factor] = []
        self.ends: list[list[tuple[_Factor, _End]]] = [[] for _ in self.classes]
        self.hubs = hubs_of(problem)
        for hub in self.hubs:
            self._add(hub)
        self.weights = []
        for i, ends in enumerate(self.ends):
            earlier, later = sum(f.first < i for f, _ in ends), sum(f.last > i for f, _ in ends)
            self.weights.append(1.0 / max(1, earlier, later))

    # assembly

    def _layouts(self, cls: int, slot: int, of_output: bool) -> tuple[tuple, np.ndarray]:
        options = self.problem.classes[cls]
        layouts = options.output_layouts(slot) if of_output else options.layouts(slot)
        numbers: dict = {}
        which = [numbers.setdefault(layouts[k], len(numbers)) for k in self.index[self.position[cls]]]
        return tuple(numbers), np.array(which)

    def _add(self, hub: Hub) -> None:
        vertex = self.problem.vertices[hub.example[0]]
        is_parameter = vertex.kind == "parameter"
        is_saved = vertex.phase == "forward" and (is_parameter or vertex.kind not in RESIDENT_LEAVES)
        backward = [c for c in hub.consumers if c[2] == "backward"]
        forward = [c for c in hub.consumers if c[2] == "forward"]
        prices_saving = self.price_saved and is_saved and bool(backward)
        splits = forward and backward and (prices_saving or (is_parameter and self.keep_parameters is False))
        for consumers in (forward, backward) if splits else (list(hub.consumers),):
            saving = prices_saving and (consumers is backward or not splits)
            parts = -(-len(consumers) // MOST_CONSUMERS)
            for i in range(parts):
                self._factor(hub, consumers[i::parts], parts, is_parameter if saving else None)

    def _factor(self, hub: Hub, consumers, parts: int, saved: bool | None) -> None:
        """`saved`: None without a price on saved copies, else whether the tensor is a parameter (its base is there anyway)."""
        sources, source_of = self._layouts(hub.producer, hub.output, True)
        bytes_ = self.problem.tensor_bytes[hub.example]
        bucketed = self.pricer.is_bucketed(hub.example[0], [slot for _, slot, _ in hub.consumers])
        wanted = [self._layouts(cls, slot, False) for cls, slot, _ in consumers]
        universe = tuple(dict.fromkeys(q for targets, _ in wanted for q in targets))
        column = {q: i for i, q in enumerate(universe)}
        cost = self.pricer.matrix(sources, universe, bytes_, bucketed) / parts
        if saved is not None:
            cost = self._with_saving(hub, cost, sources, universe, saved, len(consumers) * parts)
        cost = np.where(np.isfinite(cost), cost * hub.copies, IMPOSSIBLE_SECONDS)
        if len(consumers) == 1 and consumers[0][0] == hub.producer:  # a class that feeds itself: part of its own cost
            columns = np.array([column[q] for q in wanted[0][0]])
            self.unary[self.position[hub.producer]] += cost[source_of, columns[wanted[0][1]]]
            return
        tail = _End(self.position[hub.producer], _Side(source_of), np.zeros(len(sources)))
        heads = [
            _End(self.position[cls], _Side(which), np.zeros(len(targets)), np.array([column[q] for q in targets]))
            for (cls, _, _), (targets, which) in zip(consumers, wanted)
        ]
        factor = _Factor(cost, tail, heads)
        self.factors.append(factor)
        for end in (tail, *heads):
            self.ends[end.position].append((factor, end))

    def _with_saving(self, hub: Hub, cost, sources, universe, is_parameter: bool, readers: int) -> np.ndarray:
        """Lower bound on what a backward consumer adds: reading the base saves it; reading q keeps q or makes it again from a
        saved base, which `readers` consumers may share."""
        cost = cost.copy()
        local = [self.pricer.local_bytes(*hub.example, q) for q in universe]
        for i, p in enumerate(sources):
            base = 0.0 if is_parameter else self.byte_price * self.pricer.local_bytes(*hub.example, p) / readers
            for j, q in enumerate(universe):
                if p == q:
                    cost[i, j] = base
                elif np.isfinite(cost[i, j]):
                    keep = np.inf if is_parameter and self.keep_parameters is False else self.byte_price * local[j]
                    cost[i, j] = min(cost[i, j] + base, keep)
        return cost

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
