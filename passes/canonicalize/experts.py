"""Products of rows with the matrix of their group, as mixtures of experts write them -> `autopar::grouped_mm`."""

from __future__ import annotations

from typing import Any, TypeGuard, cast

import torch
from torch import fx

from ..._torch import schema_names
from ...ir.graph import call, operand
from ...ops import autopar

aten = torch.ops.aten


def grouped_mm(graph_module, node: fx.Node) -> fx.Node | None:
    """Replace the product of rows that are sorted by group, given where each group ends (`_grouped_mm`): a row's group
    is how many ends are not after it."""
    names = schema_names(node.target)
    given: dict[str, Any] = dict(zip(names, node.args)) | dict(node.kwargs)
    x, weight, ends, *rest = map(given.get, names)
    if x.meta["val"].dim() != 2 or weight.meta["val"].dim() != 3 or ends is None or any(rest):
        return None
    row = call(node, aten.arange.start, 0, x.meta["val"].shape[0], device=x.meta["val"].device)
    group = call(node, aten.bucketize.Tensor, row, ends, right=True)
    return call(node, autopar.grouped_mm.default, x, weight, group)


def bmm(graph_module, node: fx.Node) -> fx.Node | None:
    """Replace the product of each row with its own copy of a matrix, `bmm(x.unsqueeze(1), weight[group]).squeeze(1)` or
    the other way round."""
    left, right = node.args
    back = next(iter(node.users), None)
    if back is None or len(node.users) != 1 or back.target is not aten.squeeze.dim:
        return None
    for matrices, rows, dim, turns in ((right, left, 1, False), (left, right, 2, True)):
        picked = _picked(matrices)
        if picked is None or not _is_call(rows, aten.unsqueeze.default) or {_dim(rows, 3), _dim(back, 3)} != {dim}:
            continue
        weight, group = picked
        if turns:
            weight = call(node, aten.transpose.int, weight, 1, 2)
        product = call(back, autopar.grouped_mm.default, operand(rows), weight, group)
        product.meta["val"] = back.meta["val"]
        back.replace_all_uses_with(product)
        node.graph.erase_node(back)
        return product
    return None


def _picked(matrices) -> tuple[fx.Node, fx.Node] | None:
    """Return (weight, group) of weight[group], a matrix for each of a list of groups; None for anything else."""
    if not _is_call(matrices, aten.index.Tensor) or len(cast(list[object], matrices.args[1])) != 1:
        return None
    weight, (group,) = cast(tuple[fx.Node, list[fx.Node]], matrices.args)
    is_list = group.meta["val"].dim() == 1 and group.meta["val"].dtype in (torch.int32, torch.int64)
    return (weight, group) if is_list and weight.meta["val"].dim() == 3 else None


def _is_call(node: object, target) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target is target


def _dim(node: fx.Node, ndim: int) -> int:
    return cast(int, node.args[1]) % ndim
