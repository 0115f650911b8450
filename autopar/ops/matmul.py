"""The canonical product of stacks of matrices, whose leading dims stay dims.

ATen flattens them into one (`bmm`), and a merged dim cannot be sharded by batch and by heads at once.
"""

from __future__ import annotations

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
