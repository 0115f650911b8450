"""Autograd functions of the user: their own backward is differentiated by, not their forward's derivative."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.errors import CaptureError
from autopar.simulate.compare import verify_model


class TripledGradient(torch.autograd.Function):
    """Rounds, and passes three times the gradient through."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * ctx.factor * (x > 0), None


class WritesInPlace(torch.autograd.Function):
    """Fills parts of what it made, one after the other, as kernels that go by chunks do; an output may be None."""

    @staticmethod
    def forward(ctx, x, with_maximum):
        y, maximum = torch.zeros_like(x), torch.full_like(x[:, 0], float("-inf"))
        for start in range(0, x.shape[1], 4):
            y[:, start : start + 4].add_(x[:, start : start + 4].exp()).mul_(2)
            maximum.copy_(torch.maximum(maximum, y[:, start : start + 4].amax(1)))
        ctx.save_for_backward(y)
        return None, y, maximum if with_maximum else None

    @staticmethod
    def backward(ctx, _, grad, of_maximum):
        (y,) = ctx.saved_tensors
        result = torch.zeros_like(y)
        for start in range(0, y.shape[1], 4):
            result[:, start : start + 4] += grad[:, start : start + 4] * y[:, start : start + 4]
        return result if of_maximum is None else result + 0.1 * of_maximum[:, None], None


class WritesToItsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        return x.exp()

    @staticmethod
    def backward(ctx, grad):
        return grad


class ReturnsANumber(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2, 3.0

    @staticmethod
    def backward(ctx, grad, _):
        return grad


class Model(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.layer, self.call = nn.Linear(8, 8), call

    def forward(self, x):
        return self.call(self.layer(x)).sum()


@pytest.mark.parametrize("mesh, strategy", [("dp=2", "fsdp"), ("tp=3", None)])
def test_a_backward_of_ones_own(mesh, strategy):
    report = verify_model(
        Model(lambda y: TripledGradient.apply(y, 3.0)), (4 * torch.randn(6, 8),), mesh, strategy=strategy
    )
    assert report.match and set(report.gradient_errors) == {"layer.weight", "layer.bias"}


@pytest.mark.parametrize("with_maximum", [False, True])
@pytest.mark.parametrize("mesh, strategy", [("dp=2", "fsdp"), ("tp=2", "megatron")])
def test_writes_to_what_it_made(mesh, strategy, with_maximum):
    def call(y):
        _, z, maximum = WritesInPlace.apply(y, with_maximum)
        return z + maximum[:, None] if with_maximum else z

    assert verify_model(Model(call), (torch.randn(6, 8),), mesh, strategy=strategy).match


@pytest.mark.parametrize("function, words", [(WritesToItsInput, "writes to its inputs"), (ReturnsANumber, "None")])
def test_one_that_cannot_be_traced_is_refused(function, words):
    def call(y):
        result = function.apply(y.clone())
        return result[0] if isinstance(result, tuple) else result

    with pytest.raises(CaptureError, match=words):
        verify_model(Model(call), (torch.randn(6, 8),), "dp=2")


def test_torchs_own_apply_comes_back():
    before = torch.autograd.Function.__dict__["apply"]
    verify_model(Model(lambda y: TripledGradient.apply(y, 3.0)), (torch.randn(6, 8),), "dp=2", strategy="ddp")
    assert torch.autograd.Function.__dict__["apply"] is before
