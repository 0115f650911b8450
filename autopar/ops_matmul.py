"""The canonical products of several matrices at once.

Stacks of matrices, whose leading dims stay dims: ATen flattens them into one (`bmm`), and a merged dim cannot be sharded by batch
and by heads at once. Grouped products of a mixture of experts: rows sorted by group, each with the matrix of its group. torch has
kernels for them that take bf16 alone where it is traced (`_grouped_mm`), transformers has an op of its own for the other types;
both are one op here, of any type.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.library import custom_op


@custom_op("autopar::matmul", mutates_args=())
def matmul(a: Tensor, b: Tensor) -> Tensor:
    """(..., m, k), (..., k, n) -> (..., m, n), with the same leading dims."""
    return torch.matmul(a, b)


matmul.register_fake(lambda a, b: a.new_empty(*a.shape[:-1], b.shape[-1]))


def _backward(ctx, grad):
    a, b = ctx.saved_tensors
    da = matmul(grad, b.transpose(-1, -2)) if ctx.needs_input_grad[0] else None
    db = matmul(a.transpose(-1, -2), grad) if ctx.needs_input_grad[1] else None
    return da, db


matmul.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


@custom_op("autopar::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """(r, k), (g, k, n), (g) -> (r, n): the rows of x from ends[i - 1] to ends[i] times weight[i]; zero after the last end."""
    y = x.new_zeros(x.shape[0], weight.shape[2])
    for group, rows in _groups(ends):
        torch.mm(x[rows], weight[group], out=y[rows])
    return y


@custom_op("autopar::grouped_mm_dw", mutates_args=())
def grouped_mm_dw(x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    """(r, k), (r, n), (g) -> (g, k, n): of each group x.T @ grad over its rows."""
    dw = x.new_zeros(ends.shape[0], x.shape[1], grad.shape[1])
    for group, rows in _groups(ends):
        torch.mm(x[rows].t(), grad[rows], out=dw[group])
    return dw


def _groups(ends: Tensor) -> Iterator[tuple[int, slice]]:
    start = 0
    for group, end in enumerate(ends.tolist()):
        if end > start:
            yield group, slice(start, end)
            start = end


grouped_mm.register_fake(lambda x, weight, ends: x.new_empty(x.shape[0], weight.shape[2]))
grouped_mm_dw.register_fake(lambda x, grad, ends: x.new_empty(ends.shape[0], x.shape[1], grad.shape[1]))


def _grouped_backward(ctx, grad):
    x, weight, ends = ctx.saved_tensors
    dx = grouped_mm(grad, weight.transpose(1, 2), ends) if ctx.needs_input_grad[0] else None
    dw = grouped_mm_dw(x, grad, ends) if ctx.needs_input_grad[1] else None
    return dx, dw, None


grouped_mm.register_autograd(_grouped_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
