"""Say which ops are row-wise: each row of what they give is made of the same row of what they read, or adds up all.

    pointwise         relu, add, a cast                 tensors that broadcast over all rows are read whole
    products          rows with a matrix                which is read whole
    along a row       a sum over the last dim           as in a norm, with the dim kept; an expand undoes it
    layer_norm        its outputs, each by itself       backward gradients of weights beside rows
    sums over rows    gradients of weights

A row is all but the last dim of a tensor, and its width the bytes of that.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from ..ir.graph import is_op, tensor_arguments, tensor_of
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
LAYER_NORM, LAYER_NORM_BACKWARD = aten.native_layer_norm.default, aten.native_layer_norm_backward.default
NORMS = {LAYER_NORM: 1, LAYER_NORM_BACKWARD: 4}  # how many of the first tensors that they read are rows


def is_row_wise(node: fx.Node) -> bool:
    """Return whether each row of an op's result is made of the same row of its arguments. Of an op with several
    results each of these is asked for."""
    if _norm_of(node) is not None:
        return not sums_rows(node)
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
    if (norm := _norm_of(node)) is not None:
        return norm.target is LAYER_NORM_BACKWARD and tensor_of(node)[1] > 0
    if node.target is autopar.linear_dw.default:
        return True
    if node.target is not aten.sum.dim_IntList:
        return False
    return _dims(node) == set(range(tensor_arguments(node)[0].meta["val"].dim() - 1))


def rows_read(node: fx.Node) -> list[fx.Node]:
    """Return the arguments of an op of which a row gives the row of the result."""
    norm = _norm_of(node) or node
    arguments = tensor_arguments(norm)
    if norm.target in NORMS:
        return arguments[: NORMS[norm.target]]
    if node.target in PRODUCTS:
        return arguments[:1]
    if sums_rows(node) or reduces_each_row(node):
        return arguments
    return [a for a in arguments if not _is_of_all_rows(a, node)]


def whole_read(node: fx.Node) -> list[fx.Node]:
    """Return the other arguments of an op, of which each row reads all."""
    rows = rows_read(node)
    return [a for a in tensor_arguments(_norm_of(node) or node) if a not in rows]


def readers(node: fx.Node) -> list[fx.Node]:
    """Return what reads a tensor, in the place of a layer norm its results."""
    return [r for user in node.users for r in (user.users if user.target in NORMS else (user,))]


def results_of(node: fx.Node) -> list[fx.Node]:
    """Return all results of the op that makes a tensor."""
    norm = _norm_of(node)
    return [node] if norm is None else list(norm.users)


def with_ops(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return tensors and the ops with several results that make some of them."""
    nodes = set(nodes)
    return nodes | {norm for node in nodes if (norm := _norm_of(node)) is not None}


def _norm_of(node: fx.Node) -> fx.Node | None:
    """Return the layer norm over the last dim that a tensor is a result of, None if it is of another op."""
    norm, _ = tensor_of(node)
    if norm is node or norm.target not in NORMS:
        return None
    rows = tensor_arguments(norm)[0].meta["val"]
    return norm if len(bound(norm)["normalized_shape"]) == 1 and rows.dim() > 1 else None


def width_bytes(node: fx.Node) -> int:
    """Return the bytes of a row of a tensor, in all its global width."""
    value = node.meta.get("global", node.meta["val"])
    return int(value.shape[-1] * value.element_size())


def _is_along_rows(node: fx.Node) -> bool:
    if node.target is EXPAND:  # of one number a row
        (argument,) = tensor_arguments(node)
        return bool(argument.meta["val"].dim() == node.meta["val"].dim())
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
