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

from ..objective.modes import BACKWARD, BOTH, FORWARD, MAKE, ONCE, Mode, cost, modes_of, waits
from ..objective.pricer import Pricer
from ..problem.multipliers import PHASES, Prices
from ..problem.problem import Problem
from ..problem.vertices import STATE
from .transfer_grid import TransferGrid

_least = np.minimum.reduce


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
    {FORWARD: (p, q), BACKWARD: (p, q), BOTH: (p, q)}, each when it is asked for."""

    base: np.ndarray
    block: Mapping[int, np.ndarray]


class _Blocks(dict):
    """The payments of a hyperedge in one mode, priced when they are asked for."""

    def __init__(self, hyperedge: HyperedgePrices, mode: Mode, prices: Prices, is_priced: bool):
        super().__init__()
        self.hyperedge, self.mode, self.prices, self.is_priced = hyperedge, mode, prices, is_priced

    def __missing__(self, phases: int) -> np.ndarray:
        self[phases] = self.hyperedge.block(self.mode, phases, self.prices, self.is_priced)
        return self[phases]


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
        self.grid = TransferGrid.of(pricer, hyperedge.example, slots, self.sources, self.targets)
        self.is_once = (self.grid.share < 1)[:, None]
        number = {layout: i for i, layout in enumerate(self.sources)}
        self.same_as = np.array([number.get(q, -1) for q in self.targets])  # the source that is a column's layout
        self._copy_bytes = np.array([pricer.saved_bytes(*hyperedge.example, q) for q in self.targets])
        self._base_bytes = np.array([pricer.saved_bytes(*hyperedge.example, p) for p in self.sources])
        self._whole_bytes = self._unreduced_bytes(slots)

    @property
    def is_possible(self) -> np.ndarray:
        """Return whether there is a redistribution for every (source, target)."""
        return self.grid.is_possible

    def _unmoved(self) -> tuple[np.ndarray, np.ndarray]:
        """Return where a column is the producer's own layout."""
        columns = np.flatnonzero(self.same_as >= 0)
        return self.same_as[columns], columns

    def _unreduced_bytes(self, slots: list[int]) -> np.ndarray | None:
        """Return what one gradient of one parameter takes, in the type of that, beyond its shard if it waits, as it is
        made, for one reduction; None of other tensors."""
        consumers = [self.problem.vertices[cls] for cls, _, _ in self.hyperedge.consumers]
        is_gradient = slots == [STATE] and self.phases == [BACKWARD] and consumers[0].kind == "parameter"
        if not self.pricer.reduces_once or not is_gradient:
            return None
        master = consumers[0].node.meta["val"]
        made, shards = ([self.pricer.bytes_of(master, x) for x in xs] for xs in (self.sources, self.targets))
        return np.maximum(0.0, np.subtract.outer(made, shards))

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
        few = copy.copy(self)
        few.sources = tuple(self.sources[p] for p in sources)
        few.targets = tuple(self.targets[q] for q in columns)
        few.grid, few.is_once = self.grid.chosen(sources, columns), self.is_once[sources]
        few._copy_bytes, few._base_bytes = self._copy_bytes[columns], self._base_bytes[sources]
        few._whole_bytes = None if self._whole_bytes is None else self._whole_bytes[np.ix_(sources, columns)]
        number = {p: i for i, p in enumerate(sources.tolist())}
        few.same_as = np.array([number.get(p, -1) for p in self.same_as[columns].tolist()], int)
        return few

    def _priced(self, prices: Prices, phase: str, is_once: bool = False) -> np.ndarray:
        """Return the priced seconds from every source to every target, inf where there is no way."""
        if not prices.links:
            return self.grid.seconds()
        if self.is_hidden and not is_once and self.is_once.any():
            each, once = (self.grid.seconds(np.array(prices.hidden(phase, x))) for x in (False, True))
            return np.where(self.is_once, once, each)
        weights = prices.hidden(phase, is_once) if self.is_hidden else prices.blocking(phase)
        return self.grid.seconds(np.array(weights))

    def modes(self, prices: Prices, keep_parameters: bool | None, reruns: Collection[int] = ()) -> list[PricedMode]:
        """Return the modes in which one copy of the hyperedge may be served, at these prices. `keep_parameters` says
        whether gathered parameters are kept for the backward (None: as prices say); classes of `reruns` may run
        again."""
        is_priced, is_parameter = prices.saved and waits(self.vertex), self.vertex.kind == "parameter"
        base = np.zeros((2, len(self.sources)))
        is_read_late = BACKWARD in self.phases or any(cls in reruns for cls, _, _ in self.hyperedge.consumers)
        if is_priced and is_read_late and not is_parameter:
            base[0] = prices.byte_seconds * self._base_bytes
        return [
            PricedMode(base if mode.saves_base else np.zeros_like(base), _Blocks(self, mode, prices, is_priced))
            for mode in modes_of(self.vertex, self.pricer.gathers_once, keep_parameters)
            if mode.saves_base or is_priced and is_read_late  # else what waits costs nothing
        ]

    def block(self, mode: Mode, phases: int, prices: Prices, is_priced: bool) -> np.ndarray:
        """Return what a block of consumers that read in these phases pays in a mode, by source and target; `is_priced`:
        for the bytes of copies too."""
        ways = mode.ways[phases]
        if not ways:
            return np.full((len(self.sources), len(self.targets)), np.inf)
        early, late = (self._priced(prices, x) if phases & bit else 0.0 for x, bit in zip(PHASES, (FORWARD, BACKWARD)))
        once = self._priced(prices, "forward", True) / self.pricer.micro_batches if ONCE in ways else 0.0
        held: float | np.ndarray = 0.0
        if is_priced and ways != (MAKE,):
            held = np.tile(prices.byte_seconds * self._copy_bytes, (len(self.sources), 1))
            held[self._unmoved()] = 0.0
        found: np.ndarray = _least([np.asarray(cost(way, phases, early, late, once, held)) for way in ways])
        if self._whole_bytes is not None:
            found += prices.gradients * prices.byte_seconds * self._whole_bytes
        if not mode.saves_base and phases == BOTH:
            found[self._unmoved()] = np.inf
        return found


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
