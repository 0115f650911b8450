"""A user's op and a user's schedule on real processes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import autopar
from tests.helpers import gloo
from tests.helpers.crossings import crossings

from ..runtime.parity import assert_close, device_mesh, full
from .library import gate, gate_backward, gated

# rank 1 takes the micro-batches in another order than they are sent in
CROSSING = ["0F0 0F1 0F2 0B0 0B1 0B2", "1F2 1F0 1F1 1B1 1B2 1B0"]


def _compared(model: nn.Module, inputs: tuple, mesh: str, **options) -> nn.Module:
    reference = copy.deepcopy(model)
    parallel = autopar.compile(model, device_mesh(mesh), inputs, **options)
    loss, expected = parallel(*inputs), reference(*inputs)
    assert_close(loss, expected, "loss")
    loss.backward()
    expected.backward()
    for name, parameter in parallel.named_parameters():
        assert_close(full(parameter.grad), reference.get_parameter(name).grad, name)
    return parallel


class Deep(nn.Sequential):
    def forward(self, x):
        return super().forward(x).square().mean()


def _run(rank: int) -> str:
    autopar.register_rule(gate, "... _, _ n -> ... n")
    autopar.register_rule(gate_backward, "..., ... -> ...", linear=[0])
    assert not _compared(*gated(), "tp=2", strategy="megatron").plan.warnings
    torch.manual_seed(0)
    deep = Deep(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
    schedule = autopar.Schedule.parse("crossing", CROSSING)
    plan = _compared(deep, (torch.randn(6, 16),), "pp=2", schedule=schedule).plan
    return str(plan.pipeline.orders)


@pytest.mark.gloo
def test_a_rule_and_a_schedule_on_processes():
    assert crossings(autopar.Schedule.parse("crossing", CROSSING))
    first, second = gloo.run(2, _run, seconds=240)
    assert first == second and [line.partition(": ")[2] for line in first.splitlines()[1:]] == CROSSING
