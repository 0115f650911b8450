"""Seconds of redistributions for whole matrices of layouts.

For a tensor of B bytes every distinct step is priced once, rows (autopar/cost/transfer_rows.py) are sums of steps, and
a matrix of pairs only looks rows up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from ..ir.layout import Layout
from ..ir.mesh import whole_axis
from .collectives import CollectiveCost
from .hierarchy import Hierarchy
from .redistribute import Redistributor
from .transfer_rows import IMPOSSIBLE, TransferRows


class TransferPrices:
    """Prices of one mesh. `collectives` prices all steps but local slices; the links' latency and speed do if it is not
    given. `class_of`: by axis the class of links that its collectives use, all one class unless given."""

    def __init__(
        self,
        redistribute: Redistributor,
        collectives: CollectiveCost | None = None,
        class_of: Mapping[str, int] | None = None,
    ):
        self.redistribute, self.collectives = redistribute, collectives
        self.class_of = class_of or dict.fromkeys(redistribute.mesh.names, 0)
        self.streams = 2 + max(self.class_of.values())
        self._rows = TransferRows(redistribute)
        self._seconds: dict[float, np.ndarray] = {}  # by bytes: of every row
        self._split: dict[float, np.ndarray] = {}  # the same by stream

    @cached_property
    def hierarchy(self) -> Hierarchy:
        """Return which collectives over axes of the mesh, or parts of them, are priced tier by tier."""
        found, names = self.collectives.hierarchy if self.collectives else {}, {*self.redistribute.mesh.names}
        return {key: steps for key, steps in found.items() if names.issuperset(map(whole_axis, key[1]))}

    @cached_property
    def at_once(self) -> TransferPrices:
        """Return the prices of redistributions that the step's graphs do not contain: none goes by tier."""
        if self.collectives is None or not self.hierarchy:
            return self
        return TransferPrices(self.redistribute, self.collectives.at_once, self.class_of)

    def _step_seconds(self, bytes_: float) -> np.ndarray:
        """Return the seconds of every distinct step for a tensor of so many global bytes."""
        price, alike = np.zeros(len(self._rows.steps)), defaultdict(list)
        for step, number in self._rows.steps.items():
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
        return self._rows.between(sources, targets)

    def seconds(self, bytes_: float) -> np.ndarray:
        """Return the seconds of every row for a tensor of so many global bytes."""
        found = self._seconds.get(bytes_)
        if found is None or len(found) < len(self._rows):
            found = self._seconds[bytes_] = self._step_seconds(bytes_)[self._rows.table].sum(1)
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
            streams = np.array([0 if step is None else self.stream_of(*step[:2]) for step in self._rows.steps])
            each, table = self._step_seconds(bytes_), self._rows.table
            found = np.stack([np.where(streams == s, each, 0.0)[table].sum(1) for s in range(self.streams)])
            self._split[bytes_] = found
        return found

    def stream_of(self, kind: str, axes: tuple[str, ...]) -> int:
        """Return the stream of a step: 0 computes; over several classes of links it is that of the outermost."""
        return 0 if kind == "slice" else 1 + max(self.class_of[axis] for axis in axes)
