"""Hyperedges: a tensor with all its uses. Each layout that any of them wants is paid for once.

Hyperedges of one producer class with the same consumer classes are copies of each other. How a tensor is served is said
in autopar/planner/objective/modes.py; here its modes are priced for all layouts at once. If its producer runs again in
the backward, a tensor is there without being saved; a forward consumer that runs again reads in both phases.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from ..objective.modes import BACKWARD, BOTH, FORWARD, cost, modes_of, waits
from ..objective.pricer import Pricer
from ..problem.multipliers import PHASES, Prices
from ..problem.problem import Problem
from ..problem.vertices import STATE


@dataclass(frozen=True)
class Hyperedge:
    """Copies of one tensor pattern: producer class and output, consumers as (class, slot, phase)."""

    producer: int
    output: int
    consumers: tuple[tuple[int, int, str], ...]
    copies: int
    example: tuple[int, int]  # one member tensor


def hyperedges_of(problem: Problem) -> list[Hyperedge]:
    """Return the hyperedges of a problem, those that are copies of each other as one."""
    members: dict[tuple, list[tuple[int, int]]] = {}
    for tensor, uses in problem.uses_of.items():
        cls = problem.vertices[tensor[0]].cls
        found = {(problem.vertices[use.consumer].cls, use.slot, use.phase) for use in uses}
        members.setdefault((cls, tensor[1], tuple(sorted(found))), []).append(tensor)
    copies = problem.copies(problem.half)
    return [Hyperedge(cls, o, found, sum(copies[v] for v, _ in t), t[0]) for (cls, o, found), t in members.items()]


@dataclass
class PricedMode:
    """A mode at some prices: what the tensor itself costs by producer layout p, in two rows, the second if the producer
    runs again; and for every column q what a block of consumers that takes q pays, by the phases in the block:
    {FORWARD: (p, q), BACKWARD: (p, q), BOTH: (p, q)}."""

    base: np.ndarray
    block: dict[int, np.ndarray]


class HyperedgePrices:
    """Layouts and prices of one hyperedge for all strategies of its classes. `source_of[k]`: number of the layout in
    which strategy k of the producer hands the tensor out; `target_of[i][k]`: column of the layout that strategy k of
    consumer i wants."""

    def __init__(self, problem: Problem, pricer: Pricer, hyperedge: Hyperedge):
        self.problem, self.pricer, self.hyperedge = problem, pricer, hyperedge
        sources: dict = {}
        targets: dict = {}
        layouts = problem.classes[hyperedge.producer].output_layouts(hyperedge.output)
        self.source_of = np.array([sources.setdefault(layout, len(sources)) for layout in layouts])
        self.target_of = [
            np.array([targets.setdefault(layout, len(targets)) for layout in problem.classes[cls].layouts(slot)])
            for cls, slot, _ in hyperedge.consumers
        ]
        self.sources, self.targets = tuple(sources), tuple(targets)
        self.phases = [BACKWARD if phase == "backward" else FORWARD for _, _, phase in hyperedge.consumers]
        self.vertex = problem.vertices[hyperedge.example[0]]
        slots = [slot for _, slot, _ in hyperedge.consumers]
        self.is_hidden = pricer.is_bucketed(hyperedge.example[0], slots)
        times = np.array([pricer.times(hyperedge.example[0], slots, p) for p in self.sources])
        self.is_once = (times < pricer.micro_batches)[:, None]
        self.split = self._redistributions(slots) * (times / pricer.micro_batches)[:, None]
        self.seconds = self.split.sum(0)
        self.is_possible = pricer.is_possible(self.sources, self.targets)
        number = {layout: i for i, layout in enumerate(self.sources)}
        self.same_as = np.array([number.get(q, -1) for q in self.targets])  # the source that is a column's layout
        columns = np.flatnonzero(self.same_as >= 0)
        self._unmoved = self.same_as[columns], columns  # where a column is the producer's own layout
        self._copy_bytes = np.tile(
            [pricer.local_bytes(*hyperedge.example, q) for q in self.targets], (len(self.sources), 1)
        )
        self._copy_bytes[self._unmoved] = 0.0
        self._whole_bytes = self._unreduced_bytes(slots)
        self._base_bytes = np.array([pricer.local_bytes(*hyperedge.example, p) for p in self.sources])

    def _redistributions(self, slots: list[int]) -> np.ndarray:
        """Return the seconds by stream from every source to every target, none where there is no way."""
        pricer, tensor = self.pricer, self.hyperedge.example
        bytes_ = [pricer.moved_bytes(*tensor, slots, p) for p in self.sources]
        whole = self.problem.tensor_bytes[tensor]
        seconds = pricer.split(self.sources, self.targets, whole, self.is_hidden)
        for i, (p, moved) in enumerate(zip(self.sources, bytes_)):
            if moved != whole:
                casts = [pricer.cast_seconds(*tensor, p, q, moved) for q in self.targets]
                seconds[:, i] = pricer.split((p,), self.targets, moved, self.is_hidden)[:, 0]
                seconds[0, i] += casts
        return seconds

    def _unreduced_bytes(self, slots: list[int]) -> np.ndarray:
        """Return what one gradient of one parameter takes, in the type of that, beyond its shard if it waits, as it is
        made, for one reduction."""
        consumers = [self.problem.vertices[cls] for cls, _, _ in self.hyperedge.consumers]
        found = np.zeros((len(self.sources), len(self.targets)))
        is_gradient = slots == [STATE] and self.phases == [BACKWARD] and consumers[0].kind == "parameter"
        if self.pricer.reduces_once and is_gradient:
            master = consumers[0].node.meta["val"]
            made, shards = ([self.pricer.bytes_of(master, x) for x in xs] for xs in (self.sources, self.targets))
            found = np.maximum(0.0, np.subtract.outer(made, shards))
        return found

    def among(self, allowed: Mapping[int, np.ndarray]) -> HyperedgePrices:
        """Return the prices of the layouts alone that the strategies have which these masks by class allow; a strategy
        that is not allowed has no layout of them."""
        here, ends = self.hyperedge, [cls for cls, _, _ in self.hyperedge.consumers]
        sources = np.unique(self.source_of[allowed[here.producer]])
        columns = np.unique(np.concatenate([of[allowed[cls]] for cls, of in zip(ends, self.target_of)]))
        if len(sources) == len(self.sources) and len(columns) == len(self.targets):
            return self
        few = self.chosen(sources, columns)
        number = np.full((2, max(len(self.sources), len(self.targets))), -1)
        number[0, sources], number[1, columns] = np.arange(len(sources)), np.arange(len(columns))
        few.source_of, few.target_of = number[0, self.source_of], [number[1, of] for of in self.target_of]
        return few

    def chosen(self, sources: np.ndarray, columns: np.ndarray) -> HyperedgePrices:
        """Return the prices of some of the sources and of the columns alone, numbered in this order: few numbers to
        price again and again."""
        few, at = copy.copy(self), np.ix_(sources, columns)
        few.sources = tuple(self.sources[p] for p in sources)
        few.targets = tuple(self.targets[q] for q in columns)
        few.is_once, few.split = self.is_once[sources], self.split[:, sources][:, :, columns]
        few.seconds, few.is_possible = self.seconds[at], self.is_possible[at]
        few._copy_bytes, few._base_bytes = self._copy_bytes[at], self._base_bytes[sources]
        few._whole_bytes = self._whole_bytes[at]
        number = {p: i for i, p in enumerate(sources.tolist())}
        few.same_as = np.array([number.get(p, -1) for p in self.same_as[columns].tolist()], int)
        unmoved = np.flatnonzero(few.same_as >= 0)
        few._unmoved = few.same_as[unmoved], unmoved
        return few

    def _priced(self, prices: Prices, phase: str, is_once: bool = False) -> np.ndarray:
        """Return the priced seconds from every source to every target, inf where there is no way."""
        if not prices.links:
            seconds = self.seconds
        elif self.is_hidden and not is_once and self.is_once.any():
            each, once = (np.tensordot(prices.hidden(phase, x), self.split, 1) for x in (False, True))
            seconds = np.where(self.is_once, once, each)
        else:
            weights = prices.hidden(phase, is_once) if self.is_hidden else prices.blocking(phase)
            seconds = np.tensordot(weights, self.split, 1)
        return np.where(self.is_possible, seconds, np.inf)

    def modes(self, prices: Prices, keep_parameters: bool | None, reruns: Collection[int] = ()) -> list[PricedMode]:
        """Return the modes in which one copy of the hyperedge may be served, at these prices. `keep_parameters` says
        whether gathered parameters are kept for the backward (None: as prices say); classes of `reruns` may run
        again."""
        early, late = (self._priced(prices, phase) for phase in PHASES)
        once = self._priced(prices, "forward", True) / self.pricer.micro_batches
        is_priced, is_parameter = prices.saved and waits(self.vertex), self.vertex.kind == "parameter"
        held = prices.byte_seconds * self._copy_bytes if is_priced else 0.0
        whole = prices.gradients * prices.byte_seconds * self._whole_bytes
        base = np.zeros((2, len(self.sources)))
        is_read_late = BACKWARD in self.phases or any(cls in reruns for cls, _, _ in self.hyperedge.consumers)
        if is_priced and is_read_late and not is_parameter:
            base[0] = prices.byte_seconds * self._base_bytes
        priced = []
        for mode in modes_of(self.vertex, self.pricer.gathers_once, keep_parameters):
            if not mode.saves_base and not (is_priced and is_read_late):
                continue  # what waits costs nothing
            block = {}
            for phases, ways in mode.ways.items():
                costs = [cost(way, phases, early, late, once, held) for way in ways]
                block[phases] = np.minimum.reduce(costs) + whole if costs else np.full_like(late, np.inf)
            if not mode.saves_base:
                block[BOTH][self._unmoved] = np.inf
            priced.append(PricedMode(base if mode.saves_base else np.zeros_like(base), block))
        return priced


def served(
    modes: list[PricedMode], p: int | np.ndarray, columns: list[int], phases: list[int], rerun: int = 0
) -> float | np.ndarray:
    """Return the seconds of the cheapest mode when the consumers take these columns; `rerun` is 1 if the producer runs
    again."""
    block: dict[int, int] = {}
    for q, phase in zip(columns, phases):
        block[q] = block.get(q, 0) | phase
    values = []
    for mode in modes:
        value = mode.base[rerun, p]
        for q, phase in block.items():
            value = value + mode.block[phase][p, q]
        values.append(value)
    return values[0] if len(values) == 1 else np.minimum.reduce(values)
