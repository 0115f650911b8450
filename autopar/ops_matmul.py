"""The canonical product of two stacks of matrices, whose leading dims stay dims: ATen flattens them into one (`bmm`), and a
merged dim cannot be sharded by batch and by heads at once."""

from __future__ import annotations

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
