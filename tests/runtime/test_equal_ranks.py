"""Ranks that no longer have the same parameters or batches, and values that are not finite, are told."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import AutoparError, DesyncError, InputError, NotFiniteError
from autopar.storage.model_folder import local
from tests.helpers import gloo

from .parity import device_mesh


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))


def _step(model, optimizer, x) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _faults(rank: int, mesh: str, strategy: str) -> tuple[str, ...]:
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    model = autopar.compile(_mlp(), device_mesh(mesh), (x,), strategy=strategy, check_every=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        _step(model, optimizer, x)
    odd, said = rank == 3, []

    def told(kind: type[AutoparError]) -> None:
        with pytest.raises(kind) as caught:
            model(x + odd * wrong)
        said.append(str(caught.value))

    model(x)
    wrong = 1.0
    told(InputError)
    wrong = 0.0
    model(x)
    saved = [local(p).clone() for p in model.parameters()]
    if odd:
        with torch.no_grad():
            local(next(model.parameters())).mul_(1.5)
    told(DesyncError)
    for p, before in zip(model.parameters(), saved):
        local(p).copy_(before)
    model(x)
    with torch.no_grad():
        if odd:
            local([*model.parameters()][-1]).view(-1)[-1] = float("nan")
    told(NotFiniteError)
    with torch.no_grad():
        for _ in range(4):
            model(x)  # which trains nothing: not counted
    return tuple(said)


@pytest.mark.gloo
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("mesh", "strategy", "equal"), [
    ("dp=2,tp=2", "megatron", "rank 1 than on rank 3"), ("dp=4", "ddp", "rank 3 than on ranks 0, 1, 2"),
])  # fmt: skip
def test_what_differs_is_named(mesh, strategy, equal):
    for batch, parameter, nan in gloo.run(4, _faults, mesh, strategy):
        assert "rank 3 passes another args[0] than rank 0" in batch
        assert f"0.weight has other values on {equal} before call 8" in parameter
        assert "it had not before call 6" in parameter
        assert "2.bias has values that are not finite on rank 3 before call 10" in nan, nan


def _another_rate(rank: int, mesh: str, strategy: str) -> str:
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    model = autopar.compile(_mlp(), device_mesh(mesh), (x,), strategy=strategy, check_every=2)
    unlike = {"lr": 0.1, "betas": (0.9, 0.99)} if rank == 1 else {"lr": 0.12}
    optimizer = torch.optim.AdamW(model.parameters(), **unlike)
    with pytest.raises(DesyncError) as caught:
        for _ in range(4):
            _step(model, optimizer, x)
    return str(caught.value)


@pytest.mark.gloo
@pytest.mark.parametrize(("mesh", "strategy"), [("dp=2", "fsdp"), pytest.param("tp=2", "fsdp", marks=pytest.mark.slow),
                                                pytest.param("dp=2", "ddp", marks=pytest.mark.slow)])  # fmt: skip
def test_another_setting_of_an_optimizer_is_named(mesh, strategy):
    """Also where every parameter is in shards, of which no two are the same."""
    for said in gloo.run(2, _another_rate, mesh, strategy):
        assert "rank 1 steps with betas (0.9, 0.99), lr 0.1 and rank 0 with betas (0.9, 0.999), lr 0.12" in said
        assert "before call 2; this is the first check" in said


def test_how_often_is_a_number():
    with pytest.raises(InputError, match="check_every is 0"):
        autopar.compile(_mlp(), None, (torch.randn(4, 6),), check_every=0)
