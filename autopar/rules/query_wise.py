"""Say how a dim goes through an op that does the same to each of its places: the sequence of an attention's queries.

    pointwise, casts       tensors that are the same at all places are read whole
    products               rows with a matrix
    views                  a reshape that keeps the dim by itself, transpose, permute, unsqueeze, squeeze
    parts                  split, slice and cat of other dims, and a slice's gradient
    along another dim      sums, means, norms
    sums over places       gradients of weights

`places` gives, for each tensor that an op reads, which of its dims become which of the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from ..ir.graph import tensor_arguments, tensor_of
from ..ops import autopar
from .reading import bound, dims_of
from .row_wise import LAYER_NORM, LAYER_NORM_BACKWARD, POINTWISE, PRODUCTS, REDUCTIONS

aten = torch.ops.aten
SAME = frozenset((aten.clone.default, aten.alias.default, aten.detach.default))
SUM = -1  # of what an op adds up over all places
Dims = Mapping[int, int]  # dims of an argument by those of the result


def rows_of(node: fx.Node, dim: int) -> dict[fx.Node, int] | None:
    """Return the tensors of which a place along `dim` of what a node holds is made of the same place, with their dims
    of places; it may read others whole. None for any other op."""
    known = _places(node)
    if known is None:
        return None
    found = {}
    for argument, dims in known.items():
        if dim in dims:
            found[argument] = dims[dim]
        elif not _is_broadcast(node, argument, dim):
            return None
    return found


def dim_of(node: fx.Node, dims: Mapping[fx.Node, int]) -> int | None:
    """Return the dim of a result that has the places of arguments whose dims are given, SUM if it adds these up, None
    if it does something else."""
    if _sums(node, dims):
        return SUM
    known = _places(node)
    found = {
        next((own for own, of in known[argument].items() if of == dim), None)
        for argument, dim in dims.items()
        if known is not None and argument in known
    }
    return found.pop() if len(found) == 1 else None


def _places(node: fx.Node) -> dict[fx.Node, Dims] | None:
    """Return, for each tensor that a node's op reads by place, its dims by those of the result."""
    op, output = tensor_of(node)
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or op.op != "call_function" or not (read := tensor_arguments(op)):
        return None
    first, ndim = read[0], value.dim()
    if op.target in PRODUCTS:
        return {first: {d: d for d in range(ndim - 1)}}
    if str(op.target) in POINTWISE or op.target in SAME:
        return {argument: _broadcast(argument, value) for argument in read}
    if op.target is aten.cat.default:
        cut = _dim(op, ndim)
        return {argument: {d: d for d in range(ndim) if d != cut} for argument in read}
    if op.target in (aten.split.Tensor, aten.split_with_sizes.default, aten.slice.Tensor):
        return {first: {d: d for d in range(ndim) if d != _dim(op, ndim)}}
    if op.target is aten.slice_backward.default and bound(op)["step"] == 1:
        return {first: {d: d for d in range(ndim) if d != _dim(op, ndim)}}
    if op.target is aten.reshape.default:
        return {first: _reshaped(first.meta["val"].shape, value.shape)}
    if op.target is aten.transpose.int:
        one, other = (bound(op)[name] % ndim for name in ("dim0", "dim1"))
        return {first: {d: {one: other, other: one}.get(d, d) for d in range(ndim)}}
    if op.target is aten.permute.default:
        return {first: {d: of % ndim for d, of in enumerate(bound(op)["dims"])}}
    if op.target is aten.unsqueeze.default:
        new = bound(op)["dim"] % ndim
        return {first: {d: d - (d > new) for d in range(ndim) if d != new}}
    if op.target is aten.expand.default:
        return {first: _broadcast(first, value)}
    if str(op.target) in REDUCTIONS:
        return {first: _reduced(op, first.meta["val"], value)}
    if op.target in (LAYER_NORM, LAYER_NORM_BACKWARD) and output == 0:
        return _normed(op, read, ndim)
    return None


def _dim(op: fx.Node, ndim: int) -> int:
    return int(bound(op)["dim"]) % ndim


def _broadcast(argument: fx.Node, value: torch.Tensor) -> Dims:
    shape, ndim = argument.meta["val"].shape, value.dim()
    missing = ndim - len(shape)
    return {d: d - missing for d in range(missing, ndim) if shape[d - missing] == value.shape[d]}


def _is_broadcast(node: fx.Node, argument: fx.Node, dim: int) -> bool:
    """Return whether an argument of a pointwise op is the same at all places along a dim of the result."""
    op, _ = tensor_of(node)
    shape = argument.meta["val"].shape
    at = dim - node.meta["val"].dim() + len(shape)
    return str(op.target) in POINTWISE and (at < 0 or shape[at] == 1)


def _reshaped(before: Sequence[int], after: Sequence[int]) -> Dims:
    """Return the dims of which a reshape leaves the places and what is before them as they are."""
    return {
        new: old
        for old in range(len(before))
        for new in range(len(after))
        if before[old] == after[new] != 1 and math.prod(before[:old]) == math.prod(after[:new])
    }


def _reduced(op: fx.Node, argument: torch.Tensor, value: torch.Tensor) -> Dims:
    gone = dims_of(bound(op)["dim"], argument.dim())
    left = [d for d in range(argument.dim()) if d not in gone]
    return {d: d for d in left} if value.dim() == argument.dim() else dict(enumerate(left))


def _normed(op: fx.Node, read: Sequence[fx.Node], ndim: int) -> dict[fx.Node, Dims] | None:
    """Return the dims that a layer norm does not normalize."""
    rows = range(ndim - len(bound(op)["normalized_shape"]))
    many = 1 if op.target is LAYER_NORM else 4  # the gradient, the input, its mean and deviation
    return {argument: {d: d for d in rows} for argument in read[:many]}


def _sums(node: fx.Node, dims: Mapping[fx.Node, int]) -> bool:
    """Return whether an op adds up its arguments over all their places."""
    op, output = tensor_of(node)
    read = tensor_arguments(op)
    if op.target is autopar.linear_dw.default:
        return all(dims.get(a, -1) in range(a.meta["val"].dim() - 1) for a in read)
    if op.target is aten.sum.dim_IntList:
        return dims.get(read[0], -1) in dims_of(bound(op)["dim"], read[0].meta["val"].dim())
    return op.target is LAYER_NORM_BACKWARD and output > 0 and read[0] in dims
