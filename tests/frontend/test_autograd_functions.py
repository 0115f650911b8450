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
    @staticmethod
    def forward(ctx, x):
        return x.exp().mul_(2)

    @staticmethod
    def backward(ctx, grad):
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


def test_one_that_cannot_be_traced_is_refused():
    with pytest.raises(CaptureError, match="could not be differentiated"):
        verify_model(Model(WritesInPlace.apply), (torch.randn(6, 8),), "dp=2")


def test_torchs_own_apply_comes_back():
    before = torch.autograd.Function.__dict__["apply"]
    verify_model(Model(lambda y: TripledGradient.apply(y, 3.0)), (torch.randn(6, 8),), "dp=2", strategy="ddp")
    assert torch.autograd.Function.__dict__["apply"] is before
