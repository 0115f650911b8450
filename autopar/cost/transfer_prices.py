"""Seconds of redistributions for whole matrices of layouts: many pairs share few sequences of steps, and few steps are
distinct.

A *row* is one sequence of steps with the share of the tensor that each finds on a device; pairs of layouts are numbered
by row. For a tensor of B bytes every distinct step is priced once, rows are sums of steps, and a matrix of pairs only
looks rows up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from ..ir.layout import Layout
from .collectives import CollectiveCost
from .hierarchy import Hierarchy
from .moves import Core
from .redistribute import Redistributor

IMPOSSIBLE, NOTHING = 1, 2  # rows of pairs without a redistribution, and without need of one
LONGEST = 8  # steps of a redistribution


class TransferPrices:
    """Prices of one mesh. `collectives` prices all steps but local slices; the links' latency and speed do if it is not
    given."""

    def __init__(
        self,
        redistribute: Redistributor,
        collectives: CollectiveCost | None = None,
        class_of: Mapping[str, int] | None = None,
    ):
        """`class_of`: by axis the class of links that its collectives use, all one class unless given."""
        self.redistribute, self.collectives = redistribute, collectives
        self.class_of = class_of or dict.fromkeys(redistribute.mesh.names, 0)
        self.streams = 2 + max(self.class_of.values())
        self._stream_of_step = [0]  # by number of a step
        self._split: dict[float, np.ndarray] = {}
        self._steps: dict[tuple | None, int] = {None: 0}  # (kind, axes, share held) -> number; 0 stands for no step
        self._rows: list[tuple[int, ...]] = [(), (), ()]
        self._steps_row: dict[tuple[int, ...], int] = {}
        self._row_number: dict[tuple, int] = {}
        self._number: dict[Layout, int] = {}
        self._layouts: list[Layout] = []
        self._row_of: dict[tuple[int, int], int] = {}  # by the numbers of two layouts
        self._matrices: dict[tuple, np.ndarray] = {}
        self._seconds: dict[float, np.ndarray] = {}  # by bytes: of every row
        self._table = np.zeros((0, LONGEST), int)

    @property
    def hierarchy(self) -> Hierarchy:
        """Return which all-reduces over several axes of the mesh are priced tier by tier."""
        found, names = self.collectives.hierarchy if self.collectives else {}, {*self.redistribute.mesh.names}
        return {axes: steps for axes, steps in found.items() if names.issuperset(axes)}

    def _step_seconds(self, bytes_: float) -> np.ndarray:
        """Return the seconds of every distinct step for a tensor of so many global bytes."""
        price, alike = np.zeros(len(self._steps)), defaultdict(list)
        for step, number in self._steps.items():
            if step is None:
                continue
            kind, axes, held = step
            if self.collectives is None or kind == "slice":
                _, latency, per_byte = self.redistribute.price(kind, axes, held)
                price[number] = latency + per_byte * bytes_
            else:
                alike[kind, axes].append((number, held))
        for (kind, axes), steps in alike.items():
            numbers, held = zip(*steps)
            price[list(numbers)] = self.collectives.seconds(kind, axes, np.array(held) * bytes_)
        return price

    def rows(self, sources: Sequence[Layout], targets: Sequence[Layout]) -> np.ndarray:
        """Return the row of every (source, target)."""
        ours, theirs = self._numbers(sources), self._numbers(targets)
        key = (tuple(ours), tuple(theirs))
        if key not in self._matrices:
            known = self._row_of
            self._matrices[key] = np.array([[known.get((p, q)) or self._row(p, q) for q in theirs] for p in ours], int)
        return self._matrices[key]

    def _numbers(self, layouts: Sequence[Layout]) -> list[int]:
        return [self._number.setdefault(layout, len(self._number)) for layout in layouts]

    def seconds(self, bytes_: float) -> np.ndarray:
        """Return the seconds of every row for a tensor of so many global bytes."""
        found = self._seconds.get(bytes_)
        if found is None or len(found) < len(self._rows):
            if len(self._table) < len(self._rows):
                self._table = np.zeros((len(self._rows), LONGEST), int)
                for row, steps in enumerate(self._rows):
                    self._table[row, : len(steps)] = steps
            found = self._seconds[bytes_] = self._step_seconds(bytes_)[self._table].sum(1)
            found[IMPOSSIBLE] = np.inf
        return found

    def matrix(self, sources: Sequence[Layout], targets: Sequence[Layout], bytes_: float) -> np.ndarray:
        """Return the seconds of every (source, target), inf where there is no redistribution."""
        rows = self.rows(sources, targets)
        return self.seconds(bytes_)[rows]

    def pair(self, source: Layout, target: Layout, bytes_: float) -> float:
        """Return the seconds of one redistribution, inf if there is none."""
        row = self.rows((source,), (target,))[0, 0]  # which may be new to `seconds`
        return float(self.seconds(bytes_)[row])

    def split(self, bytes_: float) -> np.ndarray:
        """Return the seconds of every row by stream (stream, row): local copies first, then each class of links; what
        has no redistribution takes none."""
        found = self._split.get(bytes_)
        if found is None or found.shape[1] < len(self._rows):
            self.seconds(bytes_)  # so that the table is up to date
            each, streams = self._step_seconds(bytes_), np.array(self._stream_of_step)
            found = np.stack([np.where(streams == s, each, 0.0)[self._table].sum(1) for s in range(self.streams)])
            self._split[bytes_] = found
        return found

    def stream_of(self, kind: str, axes: tuple[str, ...]) -> int:
        """Return the stream of a step: 0 computes; over several classes of links it is that of the outermost."""
        return 0 if kind == "slice" else 1 + max(self.class_of[axis] for axis in axes)

    def _row(self, p: int, q: int) -> int:
        if len(self._layouts) < len(self._number):  # numbers are given in order of insertion
            self._layouts = list(self._number)
        self._row_of[p, q] = row = self._numbered(self._layouts[p], self._layouts[q])
        return row

    def _numbered(self, source: Layout, target: Layout) -> int:
        if source == target:
            return NOTHING
        core, dims = Core.of(source, target)
        share = self.redistribute.share_in_place(source, dims)
        key = (core, share)
        if key not in self._row_number:
            path = self.redistribute.path(core)
            if path is None:
                self._row_number[key] = IMPOSSIBLE
            else:
                steps = tuple(self._numbered_step(move.kind, move.axes, held * share) for move, _, held in path)
                self._row_number[key] = self._steps_row.setdefault(steps, len(self._rows))
                if self._row_number[key] == len(self._rows):
                    self._rows.append(steps)
        return self._row_number[key]

    def _numbered_step(self, kind: str, axes: tuple[str, ...], held: float) -> int:
        number = self._steps.setdefault((kind, axes, held), len(self._steps))
        if number == len(self._stream_of_step):
            self._stream_of_step.append(self.stream_of(kind, axes))
        return number
