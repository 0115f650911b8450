"""Batch norm with a cumulative average keeps the statistics that eager torch keeps, over any batches and meshes."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from autopar.simulate.compare import verify_model

KINDS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


class Net(nn.Module):
    """x (B, C, ...) -> a number, through a norm and a layer over the channels."""

    def __init__(self, norm: nn.Module, channels: int):
        super().__init__()
        self.norm, self.head = norm, nn.Linear(channels, 3)

    def forward(self, x):
        return self.head(self.norm(x).flatten(2).mean(-1)).square().sum()


@pytest.mark.parametrize("seed", range(5))
def test_statistics_after_one_more_batch(seed):
    draw = random.Random(seed)
    dims, channels, batch, before = draw.randint(1, 3), draw.randint(2, 7), draw.randint(3, 9), draw.randint(0, 4)
    mesh = draw.choice(["dp=2", "dp=3", "tp=2", "dp=2,tp=2"])
    torch.manual_seed(seed)
    shape = (batch, channels, *(draw.randint(2, 5) for _ in range(dims)))
    norm = KINDS[dims](channels, momentum=None, affine=draw.random() < 0.5)
    for _ in range(before):
        norm(torch.randn(shape))
    report = verify_model(Net(norm, channels).train(), (2 + 3 * torch.randn(shape),), mesh)
    assert report.match, f"seed {seed}: {shape} on {mesh} after {before} batches\n{report}"
    assert report.buffer_errors.keys() == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
