"""Batch norm with `momentum=None`, as `torch.optim.swa_utils.update_bn` sets it: statistics are the mean over all
batches so far. torch reads their number as a Python float, which no trace knows; here it stays a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def traced_cumulative_average() -> Iterator[None]:
    """Inside, batch norm computes a cumulative average from the tensor that counts the batches."""
    usual = _BatchNorm.forward

    def forward(self: _BatchNorm, input: Tensor) -> Tensor:
        is_cumulative = self.momentum is None and self.training and self.track_running_stats
        return _cumulative(self, input) if is_cumulative and self.running_mean is not None else usual(self, input)

    _BatchNorm.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        _BatchNorm.forward = usual  # type: ignore[method-assign]


def _cumulative(norm: _BatchNorm, x: Tensor) -> Tensor:
    """Return what batch norm returns, whose running statistics take one more batch into their mean."""
    norm._check_input_dim(x)
    running_mean, running_var, count = norm.running_mean, norm.running_var, norm.num_batches_tracked
    assert running_mean is not None and running_var is not None and count is not None
    with torch.no_grad():
        count.add_(1)
        var, mean = torch.var_mean(x.to(running_mean.dtype), [dim for dim in range(x.dim()) if dim != 1])
        share = 1 / count.to(running_mean.dtype)
        running_mean.add_((mean - running_mean) * share)
        running_var.add_((var - running_var) * share)
    return F.batch_norm(x, None, None, norm.weight, norm.bias, True, 0.0, norm.eps)
