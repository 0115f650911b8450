"""Lower bounds and good plans fast: block-coordinate ascent on the dual of the integer program's relaxation.

The program of autopar/planner/program.py without its hubs is a pairwise energy, sum theta_v(k) + sum C_e(p, q), and TRW-S
(Kolmogorov, IEEE PAMI 28(10), 2006) raises a lower bound on it by sending messages along a node order, forward and backward.
A hub pays once for all consumers that want the same layout. In the dual that payment is divided among the consumers' edges,

    alpha_e(p, q) >= 0,    sum over the edges e of a payment alpha_e(p, q) <= cost(p, q),

so every division gives a valid bound; after each round the slack of a payment is spread evenly over its edges, which never
lowers the bound. Strategies whose reduced cost alone exceeds the gap cannot be in a better plan and are removed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .evaluate import RESIDENT_LEAVES, Pricer
from .problem import Problem
from .program import Hub, Solution, hubs_of

IMPOSSIBLE_SECONDS = 1e4  # in place of infinity, which messages could not be subtracted from


class _Side:
    """How the strategies of a class map to the layouts at one end of an edge."""

    def __init__(self, which: np.ndarray):
        self.which = which
        self.order = np.argsort(which, kind="stable")
        self.starts = np.searchsorted(which[self.order], np.arange(which.max() + 1))

    def smallest(self, values: np.ndarray) -> np.ndarray:
        """Minimum of a class's values over the strategies of each layout."""
        return np.minimum.reduceat(values[self.order], self.starts)


@dataclass
class _Edge:
    tail: int  # position of the producing class in the node order
    head: int
    at_tail: _Side
    at_head: _Side
    share: np.ndarray  # (p, q): this edge's part of the payments, copies included
    to_tail: np.ndarray
    to_head: np.ndarray


@dataclass
class _Payment:
    """Edges that share a payment. `columns[i]` maps edge i's layouts q to columns of `cost`."""

    edges: list[_Edge]
    columns: list[np.ndarray]
    cost: np.ndarray  # (p, column)


class Dual:
    """The dual of one problem for given allowed strategies and price of memory."""

    def __init__(self, problem: Problem, pricer: Pricer, allowed: dict[int, np.ndarray], byte_price: float,
                 price_saved: bool, keep_parameters: bool | None):  # fmt: skip
        self.problem, self.pricer = problem, pricer
        self.byte_price, self.price_saved, self.keep_parameters = byte_price, price_saved, keep_parameters
        self.classes = sorted(problem.classes)
        self.position = {cls: i for i, cls in enumerate(self.classes)}
        self.index = [np.flatnonzero(allowed[cls]) for cls in self.classes]
        self.unary = []
        for cls, index in zip(self.classes, self.index):
            options = problem.classes[cls]
            price = options.seconds[index] + byte_price * options.resident_bytes[index]
            self.unary.append(price * len(options.members))
        self.edges: list[_Edge] = []
        self.loops: list[_Edge] = []  # a class that feeds itself: part of its own cost
        self.payments: list[_Payment] = []
        self.hubs = hubs_of(problem)
        for hub in self.hubs:
            self._add(hub)
        self.incident: list[list[_Edge]] = [[] for _ in self.classes]
        for edge in self.edges:
            self.incident[edge.tail].append(edge)
            self.incident[edge.head].append(edge)
        self.weight = []
        for i, edges in enumerate(self.incident):
            later = sum(max(e.tail, e.head) > i for e in edges)
            self.weight.append(1.0 / max(1, later, len(edges) - later))
        self._fold_loops()

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
        both = [c for c in hub.consumers if c[2] == "backward"], [c for c in hub.consumers if c[2] == "forward"]
        if self.price_saved and is_saved and all(both):
            self._payment(hub, both[1], None)
            self._payment(hub, both[0], is_parameter)
        elif is_parameter and self.keep_parameters is False and all(both):
            self._payment(hub, both[1], None)
            self._payment(hub, both[0], None)
        elif self.price_saved and is_saved and both[0]:
            self._payment(hub, hub.consumers, is_parameter)
        else:
            self._payment(hub, hub.consumers, None)

    def _payment(self, hub: Hub, consumers, saved: bool | None) -> None:
        """`saved`: None without a price on saved copies, else whether the tensor is a parameter (its base is there anyway)."""
        sources, source_of = self._layouts(hub.producer, hub.output, True)
        bytes_ = self.problem.tensor_bytes[hub.example]
        bucketed = self.pricer.is_bucketed(hub.example[0], [slot for _, slot, _ in hub.consumers])
        wanted = [self._layouts(cls, slot, False) for cls, slot, _ in consumers]
        universe = tuple(dict.fromkeys(q for targets, _ in wanted for q in targets))
        column = {q: i for i, q in enumerate(universe)}
        cost = self.pricer.matrix(sources, universe, bytes_, bucketed)
        if saved is not None:
            cost = self._with_saving(hub, cost, sources, universe, saved, len(consumers))
        cost = np.where(np.isfinite(cost), cost * hub.copies, IMPOSSIBLE_SECONDS)
        served = np.zeros(len(universe))
        for targets, _ in wanted:
            served[[column[q] for q in targets]] += 1
        payment = _Payment([], [], cost)
        for (cls, _, _), (targets, target_of) in zip(consumers, wanted):
            columns = np.array([column[q] for q in targets])
            # a pair that cannot be is impossible on every edge, not shared among them
            share = np.where(cost[:, columns] >= IMPOSSIBLE_SECONDS, IMPOSSIBLE_SECONDS, cost[:, columns] / served[columns])
            edge = _Edge(self.position[hub.producer], self.position[cls], _Side(source_of), _Side(target_of), share,
                         np.zeros(len(sources)), np.zeros(len(targets)))  # fmt: skip
            (self.loops if edge.tail == edge.head else self.edges).append(edge)
            if edge.tail != edge.head:
                payment.edges.append(edge)
                payment.columns.append(columns)
        if len(payment.edges) > 1:
            self.payments.append(payment)

    def _with_saving(self, hub: Hub, cost, sources, universe, is_parameter: bool, readers: int) -> np.ndarray:
        """Lower bound on what a backward consumer adds: reading the base saves it; reading q keeps q or makes it again from a
        saved base, which `readers` consumers may share."""
        cost = cost.copy()
        local = [self.pricer.local_bytes(*hub.example, q) for q in universe]
        for i, p in enumerate(sources):
            base = 0.0 if is_parameter else self.byte_price * self.pricer.local_bytes(*hub.example, p) / readers
            for j, q in enumerate(universe):
                if p == q:
                    cost[i, j] = base * readers
                elif np.isfinite(cost[i, j]):
                    keep = np.inf if is_parameter and self.keep_parameters is False else self.byte_price * local[j]
                    cost[i, j] = min(cost[i, j] + base, keep)
        return cost

    def _fold_loops(self) -> None:
        for edge in self.loops:
            self.unary[edge.tail] = self.unary[edge.tail] + edge.share[edge.at_tail.which, edge.at_head.which]

    # ascent

    def _reparametrized(self, i: int) -> np.ndarray:
        theta = self.unary[i].copy()
        for edge in self.incident[i]:
            theta += edge.to_tail[edge.at_tail.which] if edge.tail == i else edge.to_head[edge.at_head.which]
        return theta

    def sweep(self, forward: bool, reduced: list[np.ndarray] | None = None) -> float:
        """One pass of messages in node order (or against it); returns the bound. Fills `reduced` with reduced costs."""
        bound = 0.0
        for i in range(len(self.classes)) if forward else range(len(self.classes) - 1, -1, -1):
            theta = self._reparametrized(i)
            smallest = theta.min()
            if reduced is not None:
                reduced[i] = theta - smallest
            bound += smallest
            scaled = (theta - smallest) * self.weight[i]
            for edge in self.incident[i]:
                other = edge.head if edge.tail == i else edge.tail
                if (other > i) != forward:
                    continue
                if edge.tail == i:
                    message = (edge.share + (edge.at_tail.smallest(scaled) - edge.to_tail)[:, None]).min(0)
                    shift = message.min()
                    edge.to_head = message - shift
                else:
                    message = (edge.share + (edge.at_head.smallest(scaled) - edge.to_head)[None, :]).min(1)
                    shift = message.min()
                    edge.to_tail = message - shift
                bound += shift
        return bound

    def share_payments(self) -> None:
        """Spread the slack of every payment evenly over the edges that share it."""
        for payment in self.payments:
            slack = np.zeros(payment.cost.shape)
            count = np.zeros(payment.cost.shape[1])
            parts = []
            for edge, columns in zip(payment.edges, payment.columns):
                rest = edge.share - edge.to_tail[:, None] - edge.to_head[None, :]
                own = np.minimum(rest - rest.min(), edge.share)  # what the edge can give away and stay >= 0
                parts.append(own)
                slack[:, columns] += own
                count[columns] += 1
            slack /= count
            for edge, columns, own in zip(payment.edges, payment.columns, parts):
                possible = payment.cost[:, columns] < IMPOSSIBLE_SECONDS
                edge.share = np.where(possible, edge.share - own + slack[:, columns], edge.share)

    # primal

    def round(self) -> list[int]:
        """A choice by position of every class, in order, each the best for the classes before it and the messages after."""
        chosen = [-1] * len(self.classes)
        for i in range(len(self.classes)):
            theta = self.unary[i].copy()
            for edge in self.incident[i]:
                if edge.tail == i:
                    j = chosen[edge.head]
                    column = edge.share[:, edge.at_head.which[j]] if j >= 0 else edge.to_tail
                    theta += column[edge.at_tail.which]
                else:
                    j = chosen[edge.tail]
                    row = edge.share[edge.at_tail.which[j]] if j >= 0 else edge.to_head
                    theta += row[edge.at_head.which]
            chosen[i] = int(theta.argmin())
        return chosen

    def as_choice(self, chosen: list[int]) -> dict[int, int]:
        return {cls: int(self.index[i][k]) for i, (cls, k) in enumerate(zip(self.classes, chosen))}


@dataclass
class Ascent:
    """Result of an ascent: the best choice found, its exact objective, the bound, and the strategies that may still improve."""

    solution: Solution
    remaining: dict[int, np.ndarray]


def ascend(dual: Dual, objective, improve, start: Solution | None = None, rounds: int = 60, gap: float = 1e-4) -> Ascent:
    """Raise the bound until it stalls or meets the best plan. `objective(choice)` is the exact cost of a choice by class and
    `improve(choice)` a local search."""
    best, bound, last = start, -np.inf, -np.inf
    reduced: list[np.ndarray] = [np.zeros(0)] * len(dual.classes)
    for turn in range(rounds):
        dual.sweep(True)
        if turn % 6 == 0 or turn == rounds - 1:
            choice = improve(dual.as_choice(dual.round()))
            value = objective(choice)
            if best is None or value < best.objective:
                best = Solution(choice, value, -np.inf)
        bound = max(bound, dual.sweep(False))
        if best is not None and best.objective - bound <= gap * abs(best.objective):
            break
        if turn % 6 == 5:
            if bound - last < 1e-6 * abs(bound):
                break
            last = bound
        dual.share_payments()
    before = dual.sweep(False)
    dual.sweep(True, reduced)
    slack = best.objective * (1 + 1e-9) - before
    remaining = {}
    for i, cls in enumerate(dual.classes):
        mask = np.zeros(len(dual.problem.classes[cls].strategies), bool)
        mask[dual.index[i][reduced[i] <= slack]] = True
        mask[best.choice[cls]] = True
        remaining[cls] = mask
    return Ascent(Solution(best.choice, best.objective, bound), remaining)
