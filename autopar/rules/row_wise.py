"""Say which ops are row-wise: each row of what they give is made of the same row of what they read, or adds up all.

    pointwise         relu, add, a cast                 tensors that broadcast over all rows are read whole
    products          rows with a matrix                which is read whole
    along a row       a sum over the last dim           as in a norm, with the dim kept; an expand undoes it
    sums over rows    gradients of weights

A row is all but the last dim of a tensor, and its width the bytes of that.
"""

from __future__ import annotations

import torch
from torch import fx

from ..ir.graph import is_op, tensor_arguments
from ..ops import autopar
from .reading import bound
from .register import full_name
from .table import ACTIVATIONS, BINARY, POINTWISE_BACKWARDS, UNARY

aten = torch.ops.aten
OTHERS = """add.Tensor sub.Tensor rsub.Tensor mul.Tensor mul.Scalar div.Tensor div.Scalar neg positive where.self
    masked_fill.Scalar _to_copy"""
POINTWISE = frozenset(map(full_name, f"{UNARY} {ACTIVATIONS} {BINARY} {POINTWISE_BACKWARDS} {OTHERS}".split()))
PRODUCTS = (autopar.linear.default, autopar.linear_dx.default)  # of rows with a matrix
REDUCTIONS = frozenset(map(full_name, "sum.dim_IntList mean.dim amax amin var.correction".split()))
EXPAND = aten.expand.default


def is_row_wise(node: fx.Node) -> bool:
    """Return whether each row of an op's result is made of the same row of its arguments."""
    if not is_op(node) or not isinstance(node.meta.get("val"), torch.Tensor) or node.meta["val"].dim() < 2:
        return False
    if node.target not in PRODUCTS and str(node.target) not in POINTWISE and not _is_along_rows(node):
        return False
    rows, read = node.meta["val"].shape[:-1], rows_read(node)
    return bool(read) and all(a.meta["val"].shape[:-1] == rows for a in read)


def reduces_each_row(node: fx.Node) -> bool:
    """Return whether an op makes one number of each row, which keeps its dim."""
    if str(node.target) not in REDUCTIONS or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    shape = tensor_arguments(node)[0].meta["val"].shape
    return len(shape) > 1 and node.meta["val"].shape == (*shape[:-1], 1) and _dims(node) == {len(shape) - 1}


def sums_rows(node: fx.Node) -> bool:
    """Return whether an op adds up all rows of its arguments."""
    if node.target is autopar.linear_dw.default:
        return True
    if node.target is not aten.sum.dim_IntList:
        return False
    return _dims(node) == set(range(tensor_arguments(node)[0].meta["val"].dim() - 1))


def rows_read(node: fx.Node) -> list[fx.Node]:
    """Return the arguments of an op of which a row gives the row of the result."""
    arguments = tensor_arguments(node)
    if node.target in PRODUCTS:
        return arguments[:1]
    if sums_rows(node) or reduces_each_row(node):
        return arguments
    return [a for a in arguments if not _is_of_all_rows(a, node)]


def whole_read(node: fx.Node) -> list[fx.Node]:
    """Return the other arguments of an op, of which each row reads all."""
    rows = rows_read(node)
    return [a for a in tensor_arguments(node) if a not in rows]


def width_bytes(node: fx.Node) -> int:
    """Return the bytes of a row of a tensor, in all its global width."""
    value = node.meta.get("global", node.meta["val"])
    return int(value.shape[-1]) * value.element_size()


def _is_along_rows(node: fx.Node) -> bool:
    if node.target is EXPAND:  # of one number a row
        (argument,) = tensor_arguments(node)
        return argument.meta["val"].dim() == node.meta["val"].dim()
    return reduces_each_row(node)


def _dims(node: fx.Node) -> set[int]:
    """Return the dims that a reduction reduces."""
    ndim = tensor_arguments(node)[0].meta["val"].dim()
    dims = bound(node)["dim"]
    return {d % ndim for d in ([dims] if isinstance(dims, int) else dims or range(ndim))}


def _is_of_all_rows(argument: fx.Node, node: fx.Node) -> bool:
    """Return whether an argument of a pointwise op is the same for all rows."""
    shape, rows = argument.meta["val"].shape, node.meta["val"].shape[:-1]
    return all(size == 1 for size in shape[:-1]) and not (len(shape) == len(rows) + 1 and shape[:-1] == rows)
