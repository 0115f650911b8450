"""Batch normalization in ops whose batch may be sharded: statistics are sums over the whole batch, as on one device.

Every op reads images (n, c, ...) and one number a channel (c); sums over n and the dims after c are Partial where those
are sharded. The gradient through the statistics is that of Ioffe & Szegedy, arXiv 1502.03167, section 3:

    dx = weight * rstd * (grad - sum(grad) / count - xhat * sum(grad * xhat) / count),    xhat = (x - mean) * rstd
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op


def _over_channels(c: Tensor, x: Tensor) -> Tensor:
    return c.view(-1, *[1] * (x.dim() - 2))


def _sum_to_channels(x: Tensor) -> Tensor:
    return x.sum([d for d in range(x.dim()) if d != 1])


def _normalized(x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    return (x - _over_channels(mean, x)) * _over_channels(rstd, x)


@custom_op("autopar::square_deviation", mutates_args=())
def square_deviation(x: Tensor, mean: Tensor) -> Tensor:
    """Return the sum of (x - mean)^2 of each channel: (n, c, ...), (c) -> (c)."""
    return _sum_to_channels((x - _over_channels(mean, x)).square())


@custom_op("autopar::batch_norm", mutates_args=())
def batch_norm(x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, count: int) -> Tensor:
    """Normalize x by the statistics of its own batch of `count` elements a channel: (n, c, ...) -> (n, c, ...). The
    gradient goes through the statistics too, so `mean` and `rstd` get none."""
    y = _normalized(x, mean, rstd)
    y = y if weight is None else y * _over_channels(weight, x)
    return (y if bias is None else y + _over_channels(bias, x)).to(x.dtype)


@custom_op("autopar::batch_norm_sums", mutates_args=())
def batch_norm_sums(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of grad and of grad * xhat of each channel: the gradients of bias and weight."""
    grad = grad.to(mean.dtype)
    return _sum_to_channels(grad), _sum_to_channels(grad * _normalized(x, mean, rstd))


@custom_op("autopar::batch_norm_dx", mutates_args=())
def batch_norm_dx(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    grad_sum: Tensor,
    grad_xhat_sum: Tensor,
    count: int,
) -> Tensor:
    """Return the gradient of x."""
    along_xhat = _normalized(x, mean, rstd) * _over_channels(grad_xhat_sum / count, x)
    scale = rstd if weight is None else rstd * weight
    return ((grad - _over_channels(grad_sum / count, x) - along_xhat) * _over_channels(scale, x)).to(x.dtype)


square_deviation.register_fake(lambda x, mean: torch.empty_like(mean))
batch_norm.register_fake(lambda x, mean, rstd, weight, bias, count: x.new_empty(x.shape))
batch_norm_sums.register_fake(lambda grad, x, mean, rstd: (torch.empty_like(mean), torch.empty_like(mean)))
batch_norm_dx.register_fake(lambda grad, x, *rest: x.new_empty(x.shape))


def _setup(ctx, inputs, output):
    x, mean, rstd, weight, bias, ctx.count = inputs
    ctx.save_for_backward(x, mean, rstd, weight)
    ctx.dtypes = tuple(None if p is None else p.dtype for p in (weight, bias))


def _backward(ctx, grad):
    x, mean, rstd, weight = ctx.saved_tensors
    grad_sum, grad_xhat_sum = batch_norm_sums(grad, x, mean, rstd)
    dx = batch_norm_dx(grad, x, mean, rstd, weight, grad_sum, grad_xhat_sum, ctx.count)
    dweight, dbias = (None if d is None else s.to(d) for d, s in zip(ctx.dtypes, (grad_xhat_sum, grad_sum)))
    return dx, None, None, dweight, dbias, None


batch_norm.register_autograd(_backward, setup_context=_setup)
