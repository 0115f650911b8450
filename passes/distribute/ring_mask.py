"""The gradient of what is added to the scores of ring attention: each step makes the columns of its block of keys.

Rows are the device's queries, columns all keys, as of the mask itself. Columns of keys that a causal mask or a window
closes to all of the device's queries are zeros. Dims that the mask is broadcast along are sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

aten = torch.ops.aten
ROWS, COLUMNS = -2, -1


def with_zeros(call: Callable[..., fx.Node], x: fx.Node, is_first: bool, dim: int) -> fx.Node:
    """Return both halves of a block along one of the last two dims, given one of them: zeros for the other."""
    missing = x.meta["val"].shape[dim]
    around = [0, missing] if is_first else [missing, 0]
    return call(aten.constant_pad_nd.default, x, around if dim == COLUMNS else [0, 0, *around], 0)


@dataclass
class MaskGradient:
    """Collects what the steps make. `call` appends an op; `columns`: by the first of a range of keys, its part."""

    call: Callable[..., fx.Node]
    mask: fx.Node
    columns: dict[int, fx.Node] = field(default_factory=dict)
    total: fx.Node | None = None

    def add(self, part: fx.Node, ranges: Sequence[tuple[int, int]]) -> None:
        """Take the gradient by keys at these places among all."""
        if self.mask.meta["val"].shape[COLUMNS] == 1:
            self.total = part if self.total is None else self.call(aten.add.Tensor, self.total, part)
            return
        at = 0
        for start, stop in ranges:
            whole = len(ranges) == 1
            length = stop - start
            self.columns[start] = part if whole else self.call(aten.slice.Tensor, part, COLUMNS, at, at + length)
            at += length

    def whole(self) -> fx.Node:
        """Return the gradient, with zeros between what the steps made."""
        if self.total is not None:
            return self.total
        found: list[fx.Node] = []
        *shape, keys = self.mask.meta["val"].shape
        end = 0
        for start in [*sorted(self.columns), keys]:
            if start > end:
                found.append(self.call(aten.new_zeros.default, self.mask, [*shape, start - end]))
            if start < keys:
                found.append(self.columns[start])
                end = start + self.columns[start].meta["val"].shape[COLUMNS]
        return self.call(aten.cat.default, found, COLUMNS)
