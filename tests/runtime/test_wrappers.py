"""Models that are parallel already, before they are compiled or because they are."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.errors import InputError, StrategyError
from tests.helpers import gloo

from .parity import assert_close, device_mesh


class Config:
    def __init__(self, scale: float):
        self.scale = scale


class Scaled(nn.Module):
    """A loss that an object without __eq__ scales."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)

    def forward(self, x, config=None):
        return self.layer(x).square().mean() * (1.0 if config is None else config.scale)


def _check(rank: int) -> int:
    mesh, x = device_mesh("dp=2"), torch.ones(4, 4)
    cpu = torch.device("cpu")

    def inside():
        return nn.Sequential(DistributedDataParallel(nn.Linear(4, 4)), nn.Linear(4, 1))

    def sharded():
        return fully_shard(Scaled(), mesh=mesh)

    for make, named in (
        (lambda: DistributedDataParallel(Scaled()), "the model is parallel already: it is a DistributedDataParallel"),
        (inside, "0 is parallel already: it is a DistributedDataParallel"),
        (sharded, "the model is parallel already: it is a FSDPScaled"),
        (lambda: FullyShardedDataParallel(Scaled(), device_id=cpu), "the model is parallel already"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=named) as caught:
            autopar.compile(make(), mesh, (x,))
        assert "model.module" in caught.value.fix
        with pytest.raises(InputError, match=named):
            autopar.plan(make(), "dp=2", (x,), hardware="cpu-gloo")
    source = Scaled()
    reference, compiled = copy.deepcopy(source), autopar.compile(source, mesh, (x,))
    for wrap in (
        DistributedDataParallel, lambda m: FullyShardedDataParallel(m, device_id=cpu),
        lambda m: fully_shard(m, mesh=mesh),
    ):  # fmt: skip
        with pytest.raises(StrategyError, match="cannot wrap a compiled model"):
            wrap(compiled)
    for scale in (2.0, 2.0, 2.0, 3.0):  # an object made anew each time
        assert_close(compiled(x, Config(scale)), reference(x, Config(scale)), str(scale))
    compiled(x).backward()
    return len(compiled.captures)


@pytest.mark.gloo
def test_on_two_processes():
    assert gloo.run(2, _check, seconds=240) == [3, 3]
