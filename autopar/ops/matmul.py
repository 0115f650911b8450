"""The canonical products of several matrices at once.

Stacks of matrices, whose leading dims stay dims: ATen flattens them into one (`bmm`), and a merged dim cannot be
sharded by batch and by heads at once. Grouped products of a mixture of experts: each row has the matrix of its group.
Elsewhere the rows are sorted by group (`_grouped_mm`), so that only all of them together tell which rows a group has,
or there is a copy of its matrix for each row (`bmm`). Here a row comes with its group, in any order: rows are a dim
that may be sharded, and the op sorts those that it gets.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.library import custom_op


@custom_op("autopar::matmul", mutates_args=())
def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply stacks of matrices: (..., m, k), (..., k, n) -> (..., m, n), with the same leading dims."""
    return torch.matmul(a, b)


matmul.register_fake(lambda a, b: a.new_empty(*a.shape[:-1], b.shape[-1]))


def _backward(ctx, grad):
    a, b = ctx.saved_tensors
    da = matmul(grad, b.transpose(-1, -2)) if ctx.needs_input_grad[0] else None
    db = matmul(a.transpose(-1, -2), grad) if ctx.needs_input_grad[1] else None
    return da, db


def save_factors(ctx, inputs, output) -> None:
    """Save each of two factors only for the other one's gradient, as ATen does: a factor that no gradient needs may be
    written to."""
    a, b = inputs
    ctx.save_for_backward(a if ctx.needs_input_grad[1] else None, b if ctx.needs_input_grad[0] else None)


matmul.register_autograd(_backward, setup_context=save_factors)


@custom_op("autopar::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, weight: Tensor, group: Tensor, offset: int = 0) -> Tensor:
    """Multiply each row of x by the matrix of its group: (r, k), (g, k, n), (r) -> (r, n); zero where there is no such
    group. `offset` is the number of the first group, so that a device may hold a range of them: the results of all add
    up to the whole."""
    y = x.new_zeros(x.shape[0], weight.shape[2])
    for i, rows in _rows_of(group, weight.shape[0], offset):
        y[rows] = x[rows] @ weight[i]
    return y


@custom_op("autopar::grouped_mm_dw", mutates_args=())
def grouped_mm_dw(x: Tensor, grad: Tensor, group: Tensor, groups: int, offset: int = 0) -> Tensor:
    """Return x.T @ grad of each of so many groups from `offset` on, over its rows: (r, k), (r, n), (r) -> (g, k, n)."""
    dw = x.new_zeros(groups, x.shape[1], grad.shape[1])
    for i, rows in _rows_of(group, groups, offset):
        torch.mm(x[rows].t(), grad[rows], out=dw[i])
    return dw


def _rows_of(group: Tensor, groups: int, offset: int) -> Iterator[tuple[int, Tensor]]:
    """Yield each of so many groups from `offset` on that has rows, as its place among them, with their indices."""
    found, order = group.sort(stable=True)
    first = torch.arange(offset, offset + groups + 1, device=group.device, dtype=group.dtype)
    ends = torch.searchsorted(found, first).tolist()
    for i, (start, end) in enumerate(zip(ends, ends[1:])):
        if end > start:
            yield i, order[start:end]


grouped_mm.register_fake(lambda x, weight, group, offset=0: x.new_empty(x.shape[0], weight.shape[2]))
grouped_mm_dw.register_fake(lambda x, grad, group, groups, offset=0: x.new_empty(groups, x.shape[1], grad.shape[1]))


def _grouped_backward(ctx, grad):
    x, weight, group = ctx.saved_tensors
    dx = grouped_mm(grad, weight.transpose(1, 2), group, ctx.offset) if ctx.needs_input_grad[0] else None
    dw = grouped_mm_dw(x, grad, group, weight.shape[0], ctx.offset) if ctx.needs_input_grad[1] else None
    return dx, dw, None, None


def _save_grouped(ctx, inputs, output) -> None:
    *tensors, ctx.offset = inputs
    ctx.save_for_backward(*tensors)


grouped_mm.register_autograd(_grouped_backward, setup_context=_save_grouped)
