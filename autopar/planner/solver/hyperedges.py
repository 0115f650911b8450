"""Hubs: a tensor with all its uses. Each layout that any of them wants is paid for once.

Hubs of one producer class with the same consumer classes are copies of each other. A forward tensor that the backward
reads can be served in several ways, each a `Mode`: it is saved as it is, and the backward makes copies again or keeps
those of the forward; or it is not saved, and the backward reads kept copies alone. If its producer runs again, it is
there without being saved; a forward consumer that runs again reads in both phases. Copies of a parameter that all
passes of a step share are kept for both.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from ..objective.evaluate import RESIDENT_LEAVES, Pricer
from ..problem.multipliers import Prices
from ..problem.problem import Problem

FORWARD, BACKWARD = 1, 2  # phases of consumers, as bits
BOTH = FORWARD | BACKWARD


@dataclass(frozen=True)
class Hub:
    """Copies of one tensor pattern: producer class and output, consumers as (class, slot, phase)."""

    producer: int
    output: int
    consumers: tuple[tuple[int, int, str], ...]
    copies: int
    example: tuple[int, int]  # one member tensor


def hubs_of(problem: Problem) -> list[Hub]:
    """Return the hubs of a problem, those that are copies of each other as one."""
    members: dict[tuple, list[tuple[int, int]]] = {}
    consumers: dict[tuple[int, int], set] = defaultdict(set)
    for use in problem.uses:
        key = (problem.vertices[use.consumer].cls, use.slot, use.phase)
        consumers[use.producer, use.output].add(key)
    for tensor, found in consumers.items():
        cls = problem.vertices[tensor[0]].cls
        members.setdefault((cls, tensor[1], tuple(sorted(found))), []).append(tensor)
    vertices = problem.vertices
    return [Hub(cls, o, found, sum(vertices[v].copies for v, _ in t), t[0]) for (cls, o, found), t in members.items()]


@dataclass
class Mode:
    """One way to serve all consumers of a hub: a price by producer layout p, in two rows, the second if the producer
    runs again; and for every column q what a block of consumers that takes q pays, by the phases in the block:
    {FORWARD: (p, q), BACKWARD: (p, q), BOTH: (p, q)}."""

    base: np.ndarray
    block: dict[int, np.ndarray]


class HubPrices:
    """Layouts and prices of one hub for all strategies of its classes. `source_of[k]`: number of the layout in which
    strategy k of the producer hands the tensor out; `target_of[i][k]`: column of the layout that strategy k of consumer
    i wants."""

    def __init__(self, problem: Problem, pricer: Pricer, hub: Hub):
        self.problem, self.pricer, self.hub = problem, pricer, hub
        sources: dict = {}
        targets: dict = {}
        layouts = problem.classes[hub.producer].output_layouts(hub.output)
        self.source_of = np.array([sources.setdefault(layout, len(sources)) for layout in layouts])
        self.target_of = [
            np.array([targets.setdefault(layout, len(targets)) for layout in problem.classes[cls].layouts(slot)])
            for cls, slot, _ in hub.consumers
        ]
        self.sources, self.targets = tuple(sources), tuple(targets)
        self.phases = [BACKWARD if phase == "backward" else FORWARD for _, _, phase in hub.consumers]
        vertex = problem.vertices[hub.example[0]]
        self.phase, self.is_parameter = vertex.phase, vertex.kind == "parameter"
        self.gathers_once = self.is_parameter and pricer.gathers_once
        self.is_saved = vertex.phase == "forward" and (self.is_parameter or vertex.kind not in RESIDENT_LEAVES)
        self.reads_saved = BACKWARD in self.phases
        self.is_hidden = pricer.is_bucketed(hub.example[0], [slot for _, slot, _ in hub.consumers])
        self.once = pricer.matrix(self.sources, self.targets, problem.tensor_bytes[hub.example], self.is_hidden)
        times = [pricer.times(hub.example[0], [slot for _, slot, _ in hub.consumers], p) for p in self.sources]
        self.once = self.once * (np.array(times) / pricer.micro_batches)[:, None]
        self.is_possible = np.isfinite(self.once)
        self.once[~self.is_possible] = 0.0
        number = {layout: i for i, layout in enumerate(self.sources)}
        self.same_as = np.array([number.get(q, -1) for q in self.targets])  # the source that is a column's layout
        self.held_bytes = np.array([pricer.local_bytes(*hub.example, q) for q in self.targets])
        self.base_bytes = np.array([pricer.local_bytes(*hub.example, p) for p in self.sources])

    @property
    def _unmoved(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the places (rows, columns) where a column is the producer's own layout."""
        columns = np.flatnonzero(self.same_as >= 0)
        return self.same_as[columns], columns

    def modes(self, prices: Prices, keep_parameters: bool | None, is_read_again: bool = False) -> list[Mode]:
        """Return the ways to serve one copy of the hub. `keep_parameters` says whether gathered parameters are kept for
        the backward (None: as prices say), `is_read_again` whether a forward consumer may run again."""
        forward, backward = ((prices.hidden(p) if self.is_hidden else 1.0) for p in ("forward", "backward"))
        early, late = (np.where(self.is_possible, self.once * weight, np.inf) for weight in (forward, backward))
        nothing = np.zeros((2, len(self.sources)))
        if self.is_parameter and keep_parameters is False:
            return [Mode(nothing, {FORWARD: early, BACKWARD: late, BOTH: early + late})]
        if self.gathers_once:
            kept = early / self.pricer.micro_batches + (prices.byte_seconds if prices.saved else 0.0) * self.held_bytes
            kept[self._unmoved] = 0.0
            if keep_parameters:
                return [Mode(nothing, {FORWARD: kept, BACKWARD: late, BOTH: kept})]
            return [
                Mode(nothing, {FORWARD: np.minimum(kept, early), BACKWARD: late, BOTH: np.minimum(kept, early + late)})
            ]
        if not (prices.saved and self.is_saved and (self.reads_saved or is_read_again)):
            return [Mode(nothing, {FORWARD: early, BACKWARD: late, BOTH: early})]
        keep = early + prices.byte_seconds * self.held_bytes
        both = keep if self.is_parameter and keep_parameters else np.minimum(keep, early + late)
        both[self._unmoved] = 0.0
        saved = Mode(nothing, {FORWARD: early, BACKWARD: late, BOTH: both})
        if self.is_parameter:
            return [saved]
        saved = Mode(np.stack([prices.byte_seconds * self.base_bytes, nothing[1]]), saved.block)
        gone = keep.copy()
        gone[self._unmoved] = np.inf
        return [saved, Mode(nothing, {FORWARD: early, BACKWARD: np.full_like(late, np.inf), BOTH: gone})]


def served(
    modes: list[Mode], p: int | np.ndarray, columns: list[int], phases: list[int], again: int = 0
) -> float | np.ndarray:
    """Return the seconds of the cheapest mode when the consumers take these columns; `again` is 1 if the producer runs
    again."""
    block: dict[int, int] = {}
    for q, phase in zip(columns, phases):
        block[q] = block.get(q, 0) | phase
    values = []
    for mode in modes:
        value = mode.base[again, p]
        for q, phase in block.items():
            value = value + mode.block[phase][p, q]
        values.append(value)
    return values[0] if len(values) == 1 else np.minimum.reduce(values)
