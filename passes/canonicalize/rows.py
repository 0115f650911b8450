"""Ops that name every sample of the batch, or every dim -> ops that say the same of a sample alone.

`x[arange(B), positions]` numbers the rows of x, as the masks of transformers and heads that read one token of each
sample do: the row itself is meant, which `x[:, positions]` and `gather` say. `squeeze()` drops the dims of size 1:
those alone are meant, whatever is left of the others on a device."""

from __future__ import annotations

from math import prod
from typing import cast

import torch
from torch import fx

from ..._torch import has_unknown_number
from ...ir.graph import call, operand

aten = torch.ops.aten
VIEWS = (aten.unsqueeze.default, aten.view.default, aten.reshape.default, aten.expand.default)


def index(graph_module, node: fx.Node) -> fx.Node | None:
    """Replace x[rows, positions] (x: (B, N, ...)) with rows = arange(B) along the first dim of the result."""
    x, indices = cast(tuple[fx.Node, list[fx.Node]], node.args)
    if len(indices) != 2 or None in indices or not _counts(indices[0], x.meta["val"].shape[0]):
        return None
    positions, shape = indices[1], node.meta["val"].shape
    if positions.meta["val"].dtype not in (torch.int32, torch.int64):
        return None
    own = tuple(positions.meta["val"].shape)
    ndim = indices[0].meta["val"].dim()
    if len(own) < ndim or own[0] == 1:  # the same positions in every row
        alike = positions if len(own) < ndim else call(node, aten.squeeze.dims, positions, [0])
        return call(node, aten.index.Tensor, x, [None, alike]) if len(own) in (ndim - 1, ndim) else None
    if ndim != 1 or own != shape[:1]:
        return None
    size, *rest = x.meta["val"].shape[1:]
    positions = call(
        node,
        aten.where.self,
        call(node, aten.lt.Scalar, positions, 0),
        call(node, aten.add.Tensor, positions, size),
        positions,
    )
    wide = call(node, aten.view.default, positions, [own[0], 1] + [1] * len(rest))
    wide = call(node, aten.expand.default, wide, [own[0], 1, *rest])
    return call(node, aten.squeeze.dims, call(node, aten.gather.default, x, 1, wide), [1])


def _counts(node, size: int) -> bool:
    """Return whether a tensor is (0, 1, ..., size - 1) along its first dim, and of size 1 in all others."""
    if not isinstance(node, fx.Node) or has_unknown_number(node.meta["val"]):  # which is refused later
        return False
    if node.meta["val"].shape[:1] != (size,) or prod(node.meta["val"].shape) != size:
        return False
    while node.target in VIEWS:
        node = node.args[0]
    return (node.target, node.args) in ((aten.arange.default, (size,)), (aten.arange.start, (0, size)))


def squeeze(graph_module, node: fx.Node) -> fx.Node:
    """Replace `squeeze()` by one that names the dims of size 1."""
    x = operand(node)
    dims = [d for d, size in enumerate(x.meta["val"].shape) if size == 1]
    return call(node, aten.squeeze.dims, x, dims) if dims else x
