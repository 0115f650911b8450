"""The sequences of steps between layouts, numbered: very many pairs of layouts share few sequences, of few steps.

A *row* is one sequence of steps with the share of the tensor that each finds on a device; pairs of layouts are numbered
by row, and steps by what tells them apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..ir.layout import Layout
from .moves import Core
from .redistribute import Redistributor

IMPOSSIBLE, NOTHING = 1, 2  # rows of pairs without a redistribution, and without need of one
LONGEST = 8  # steps of a redistribution


class TransferRows:
    """The rows of one mesh, which become more as layouts are asked for. `steps`: the number of each step, (kind, axes,
    share held); 0 stands for none."""

    def __init__(self, redistribute: Redistributor):
        self.redistribute = redistribute
        self.steps: dict[tuple | None, int] = {None: 0}
        self._rows: list[tuple[int, ...]] = [(), (), ()]
        self._table = np.zeros((0, LONGEST), int)
        self._of_steps: dict[tuple[int, ...], int] = {}
        self._of_core: dict[tuple, int] = {}
        self._of_pair: dict[tuple[int, int], int] = {}  # by the numbers of two layouts
        self._number: dict[Layout, int] = {}
        self._layouts: list[Layout] = []
        self._matrices: dict[tuple, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def table(self) -> np.ndarray:
        """Return the numbers of the steps of every row (row, step)."""
        if len(self._table) < len(self._rows):
            self._table = np.zeros((len(self._rows), LONGEST), int)
            for row, steps in enumerate(self._rows):
                self._table[row, : len(steps)] = steps
        return self._table

    def between(self, sources: Sequence[Layout], targets: Sequence[Layout]) -> np.ndarray:
        """Return the row of every (source, target)."""
        ours, theirs = self._numbers(sources), self._numbers(targets)
        key = (tuple(ours), tuple(theirs))
        if key not in self._matrices:
            known = self._of_pair
            self._matrices[key] = np.array([[known.get((p, q)) or self._pair(p, q) for q in theirs] for p in ours], int)
        return self._matrices[key]

    def _numbers(self, layouts: Sequence[Layout]) -> list[int]:
        return [self._number.setdefault(layout, len(self._number)) for layout in layouts]

    def _pair(self, p: int, q: int) -> int:
        if len(self._layouts) < len(self._number):  # numbers are given in order of insertion
            self._layouts = list(self._number)
        self._of_pair[p, q] = row = self._row(self._layouts[p], self._layouts[q])
        return row

    def _row(self, source: Layout, target: Layout) -> int:
        if source == target:
            return NOTHING
        core, dims = Core.of(source, target)
        share = self.redistribute.share_in_place(source, dims)
        key = (core, share)
        if key not in self._of_core:
            path = self.redistribute.path(core)
            if path is None:
                self._of_core[key] = IMPOSSIBLE
            else:
                held = ((move.kind, move.axes, held * share) for move, _, held in path)
                steps = tuple(self.steps.setdefault(step, len(self.steps)) for step in held)
                self._of_core[key] = self._of_steps.setdefault(steps, len(self._rows))
                if self._of_core[key] == len(self._rows):
                    self._rows.append(steps)
        return self._of_core[key]
