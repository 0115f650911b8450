"""Fake quantization: values rounded to a grid of integers and back, with gradients as if they had not been.

    q = clamp(round(x / scale) + zero_point, qmin, qmax),    y = (q - zero_point) * scale

The gradient of x is that of y where q was in the range without clamping, and zero elsewhere: the straight-through
estimator of torch.fake_quantize_per_channel_affine. A scale that is learned has the gradient of LSQ (arXiv 1902.08153,
equation 3),

    dy / dscale = q - zero_point - (x / scale where q was in the range, else 0),

times `grad_factor`. scale and zero_point broadcast against x: a tensor with a scale for each group of elements is
reshaped to groups first. zero_point is None where it is 0. Computed in the wider of x's and scale's types, y is of x's
type.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

aten = torch.ops.aten


def rounded(x: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """Return round(x / scale) + zero_point, not clamped, in the wider of x's and scale's types. It multiplies by
    1 / scale, as torch does."""
    q = torch.round(_wide(x, scale) * (1 / scale))
    return q if zero_point is None else q + zero_point


def _wide(x: Tensor, scale: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, scale.dtype))  # said, for a scale without dims would not widen x


def dequantized(q: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """Return the values that integers on the grid stand for."""
    return (q if zero_point is None else q - zero_point) * scale


def fake_quantized(x: Tensor, scale: Tensor, zero_point: Tensor | None, qmin: int, qmax: int) -> Tensor:
    """Return y, without a gradient of its own."""
    return dequantized(rounded(x, scale, zero_point).clamp(qmin, qmax), scale, zero_point).to(x.dtype)


@custom_op("autopar::fake_quantize", mutates_args=())
def fake_quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, qmin: int, qmax: int, grad_factor: float = 1.0
) -> Tensor:
    """Return y: (...), (broadcasts), (broadcasts) -> (...)."""
    return fake_quantized(x, scale, zero_point, qmin, qmax)


@custom_op("autopar::fake_quantize_bw", mutates_args=())
def fake_quantize_bw(grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None, qmin: int, qmax: int) -> Tensor:
    """Return the gradient of x."""
    q = rounded(x, scale, zero_point)
    return grad * ((q >= qmin) & (q <= qmax))


@custom_op("autopar::fake_quantize_dscale", mutates_args=())
def fake_quantize_dscale(
    grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None, qmin: int, qmax: int
) -> Tensor:
    """Return what each element of x contributes to the gradient of its scale: (...) as x, in the type of the
    computation."""
    q = rounded(x, scale, zero_point)
    clamped = q.clamp(qmin, qmax)
    slope = (clamped if zero_point is None else clamped - zero_point) - torch.where(
        q == clamped, _wide(x, scale) * (1 / scale), 0
    )
    return grad * slope


fake_quantize.register_fake(lambda x, scale, zero_point, qmin, qmax, grad_factor=1.0: torch.empty_like(x))
fake_quantize_bw.register_fake(lambda grad, x, scale, zero_point, qmin, qmax: torch.empty_like(grad))
fake_quantize_dscale.register_fake(
    lambda grad, x, scale, zero_point, qmin, qmax: torch.empty_like(
        grad, dtype=torch.promote_types(x.dtype, scale.dtype)
    )
)


def _setup(ctx, inputs, output):
    x, scale, zero_point, ctx.qmin, ctx.qmax, ctx.grad_factor = inputs
    ctx.save_for_backward(x, scale, zero_point)


def _backward(ctx, grad):
    x, scale, zero_point = ctx.saved_tensors
    dx = dscale = None
    if ctx.needs_input_grad[0]:
        dx = fake_quantize_bw(grad, x, scale, zero_point, ctx.qmin, ctx.qmax)
    if ctx.needs_input_grad[1]:
        parts = fake_quantize_dscale(grad, x, scale, zero_point, ctx.qmin, ctx.qmax)
        dscale = (_sum_to(parts, scale.shape) * ctx.grad_factor).to(scale.dtype)
    return dx, dscale, None, None, None, None


def _sum_to(parts: Tensor, shape: torch.Size) -> Tensor:
    """Add up `parts` over the dims along which a tensor of `shape` was broadcast."""
    new = parts.dim() - len(shape)
    dims = [d for d in range(parts.dim()) if d < new or shape[d - new] == 1]
    total = aten.sum.dim_IntList(parts, dims, True)
    return aten.view.default(total, list(shape))


fake_quantize.register_autograd(_backward, setup_context=_setup)
