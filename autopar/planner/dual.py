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

from collections.abc import Collection
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


FORWARD, BACKWARD = 1, 2  # phases of a factor's consumers, as bits


@dataclass
class _End:
    """One variable of a factor: the class at `position` and the message that the factor sends it, by layout."""

    position: int
    side: _Side
    message: np.ndarray
    columns: np.ndarray | slice | None = None  # a consumer's layouts as columns of the factor's prices
    phase: int = FORWARD


@dataclass(frozen=True)
class _Mode:
    """One way to serve all consumers of a hub: a price by producer layout p, and for every column q what a block of consumers
    that takes q pays, by the phases in the block: {FORWARD: (p, q), BACKWARD: (p, q), FORWARD | BACKWARD: (p, q)}."""

    base: np.ndarray
    block: dict[int, np.ndarray]


class _Factor:
    """The payments of a hub with one producer and a few consumers: the cheapest of its modes."""

    def __init__(self, modes: list[_Mode], tail: _End, heads: list[_End]):
        self.modes, self.tail, self.heads = modes, tail, heads
        self.width = next(iter(modes[0].block.values())).shape[1]
        positions = [tail.position, *(h.position for h in heads)]
        self.first, self.last = min(positions), max(positions)

    def _added(self, head: _End) -> np.ndarray:
        """What a consumer adds, by column; impossible where it does not want the column."""
        added = np.full(self.width, IMPOSSIBLE_SECONDS)
        added[head.columns] = -head.message
        return added

    def _partitions(self, mode: _Mode, heads: list[_End], added: list[np.ndarray]) -> dict[int, np.ndarray]:
        """For every set of these consumers (a bit mask), by p, the minimum over all ways in which they share payments."""
        count = len(heads)
        best = {0: np.zeros(len(mode.base))}
        if count == 1:
            columns = heads[0].columns
            best[1] = (mode.block[heads[0].phase][:, columns] - heads[0].message).min(1)
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


def _columns(targets: tuple, universe: tuple) -> np.ndarray | slice:
    """Where a consumer's layouts stand among those of all consumers; a slice, which copies nothing, if they are all of them."""
    if targets == universe:
        return slice(None)
    column = {q: i for i, q in enumerate(universe)}
    return np.array([column[q] for q in targets])


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
                 price_saved: bool = False, keep_parameters: bool | None = None,
                 recomputable: Collection[int] = ()):  # fmt: skip
        """`recomputable`: vertices whose values may be made again in the backward instead of saved; with them the bound also
        holds for plans that recompute (each at least for the price of its own op)."""
        self.problem, self.pricer, self.allowed = problem, pricer, allowed
        self.byte_price, self.price_saved, self.keep_parameters = byte_price, price_saved, keep_parameters
        self.recomputable = frozenset(recomputable)
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
        """Add a hub's factor, or several that share its prices if it has many consumers."""
        parts = -(-len(hub.consumers) // MOST_CONSUMERS)
        for i in range(parts):
            self._factor(hub, hub.consumers[i::parts], parts)

    def _factor(self, hub: Hub, consumers, parts: int) -> None:
        sources, source_of = self._layouts(hub.producer, hub.output, True)
        wanted = [self._layouts(cls, slot, False) for cls, slot, _ in consumers]
        universe = tuple(dict.fromkeys(q for targets, _ in wanted for q in targets))
        scale = hub.copies / parts
        modes = [
            _Mode(
                np.minimum(mode.base * scale, IMPOSSIBLE_SECONDS),
                {phase: np.minimum(price * scale, IMPOSSIBLE_SECONDS) for phase, price in mode.block.items()},
            )
            for mode in self._modes(hub, sources, universe)
        ]
        if len(consumers) == 1 and consumers[0][0] == hub.producer:  # a class that feeds itself: part of its own cost
            phase = BACKWARD if consumers[0][2] == "backward" else FORWARD
            values = [m.base[source_of] + m.block[phase][source_of, wanted[0][1]] for m in modes]  # its layouts: the columns
            self.unary[self.position[hub.producer]] += np.minimum.reduce(values)
            return
        tail = _End(self.position[hub.producer], _Side(source_of), np.zeros(len(sources)))
        heads = [
            _End(self.position[cls], _Side(which), np.zeros(len(targets)), _columns(targets, universe),
                 BACKWARD if phase == "backward" else FORWARD)
            for (cls, _, phase), (targets, which) in zip(consumers, wanted)
        ]  # fmt: skip
        factor = _Factor(modes, tail, heads)
        self.factors.append(factor)
        for end in (tail, *heads):
            self.ends[end.position].append((factor, end))

    def _modes(self, hub: Hub, sources, universe) -> list[_Mode]:
        """The ways to serve a hub. With a price on saved values a forward tensor is saved as it is (then the backward may make
        copies again or keep those of the forward) or not (then the backward reads only kept copies)."""
        vertex = self.problem.vertices[hub.example[0]]
        is_parameter = vertex.kind == "parameter"
        bytes_ = self.problem.tensor_bytes[hub.example]
        bucketed = self.pricer.is_bucketed(hub.example[0], [slot for _, slot, _ in hub.consumers])
        once = self.pricer.matrix(sources, universe, bytes_, bucketed)
        nothing = np.zeros(len(sources))
        is_saved = vertex.phase == "forward" and (is_parameter or vertex.kind not in RESIDENT_LEAVES)
        reads_saved = any(phase == "backward" for _, _, phase in hub.consumers)
        if is_parameter and self.keep_parameters is False:
            return [_Mode(nothing, {FORWARD: once, BACKWARD: once, FORWARD | BACKWARD: 2 * once})]
        if not (self.price_saved and is_saved and reads_saved):
            return [_Mode(nothing, dict.fromkeys((FORWARD, BACKWARD, FORWARD | BACKWARD), once))]
        same = np.array([[p == q for q in universe] for p in sources])
        held = self.byte_price * np.array([self.pricer.local_bytes(*hub.example, q) for q in universe])
        keep = once + held[None, :]
        must_keep = is_parameter and self.keep_parameters
        both = np.where(same, 0.0, keep if must_keep else np.minimum(keep, 2 * once))
        saved = _Mode(nothing, {FORWARD: once, BACKWARD: once, FORWARD | BACKWARD: both})
        if is_parameter:
            return [saved]
        base = self.byte_price * np.array([self.pricer.local_bytes(*hub.example, p) for p in sources])
        saved = _Mode(base, saved.block)
        gone = np.where(same, np.inf, keep)
        dropped = _Mode(nothing, {FORWARD: once, BACKWARD: np.full_like(once, np.inf), FORWARD | BACKWARD: gone})
        if hub.example[0] not in self.recomputable:
            return [saved, dropped]
        again = np.full(len(sources), float(self.problem.classes[hub.producer].seconds.min()))
        return [saved, dropped, _Mode(again, {FORWARD: once, BACKWARD: once, FORWARD | BACKWARD: 2 * once})]

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
