"""Batch norm over a sharded batch has the statistics of the whole batch, forward, backward and running."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.simulate.compare import verify_model
from autopar.simulate.step import plan_and_capture


class Net(nn.Module):
    """Without a bias before the norm, whose gradient would be zero but for rounding."""

    def __init__(self, norm):
        super().__init__()
        self.convolution, self.norm, self.head = nn.Conv2d(3, 6, 3, bias=False), norm, nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.norm(self.convolution(x)).relu().mean((2, 3))).square().sum()


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm2d(6), nn.BatchNorm2d(6, affine=False, momentum=0.3, track_running_stats=False)]
)
def test_training(norm):
    torch.manual_seed(0)
    x = (3 + 2 * torch.randn(7, 3, 6, 6),)  # 7 images over 3 devices
    report = verify_model(Net(norm).train(), x, "dp=3", strategy="ddp")
    assert report.match, report
    assert report.buffer_errors.keys() == dict(norm.named_buffers(prefix="norm")).keys()


def test_the_batch_is_sharded():
    plan, captured = plan_and_capture(
        Net(nn.BatchNorm2d(6)).train(), "dp=2", (torch.randn(4, 3, 6, 6),), strategy="ddp"
    )
    layouts = {n: str(s.inputs[0]) for n, s in plan.sharding.nodes.items() if "batch_norm" in n or "convolution" in n}
    assert len(layouts) == 5 and set(layouts.values()) == {"dp:S(0)"}, layouts


def test_evaluation_keeps_the_running_statistics():
    report = verify_model(Net(nn.BatchNorm2d(6)).eval(), (torch.randn(4, 3, 6, 6),), "dp=2", strategy="ddp")
    assert report.match and max(report.buffer_errors.values()) == 0
