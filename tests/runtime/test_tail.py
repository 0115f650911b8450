"""Steps with a tail on gloo: balancing losses and losses of all pairs on two processes, as stages and without."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

import autopar
from tests.helpers import gloo, whole_batch

from .parity import assert_close, device_mesh, full, pair


def _assert_gradients(parallel, reference, note: str) -> None:
    wanted = dict(reference.named_parameters())
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [name for name, _ in parallel.named_parameters()])
    assert {*sum(everyone, [])} == {*wanted}
    for name, parameter in parallel.named_parameters():
        assert (parameter.grad is None) == (wanted[name].grad is None), name
        if parameter.grad is not None:
            assert_close(parameter.grad, wanted[name].grad, f"{note} {name}")
        parameter.grad = None
    for parameter in wanted.values():
        parameter.grad = None


def _step(parallel, reference, batch: dict, note: str) -> None:
    mine, whole = parallel(**batch), reference(**batch)
    assert_close(mine["loss"], whole["loss"], note)
    for name in sorted({*whole} & {"logits", "aux_loss", "embeddings"}):
        assert_close(mine[name], whole[name], f"{note} {name}")
    (2 * mine["loss"]).backward()
    (2 * whole["loss"]).backward()
    _assert_gradients(parallel, reference, note)


def _pairs(rank: int, mesh: str, loss: str) -> tuple[str, int]:
    """Steps of several sizes, one without gradients between them, and a step of the optimizer."""
    options = dict(micro_batches=3, outputs="everywhere")
    options |= dict(schedule="gpipe") if mesh == "pp=2" else {}
    parallel, reference = pair(whole_batch.Pairs(loss), device_mesh(mesh), whole_batch.pairs(8), **options)
    _step(parallel, reference, whole_batch.pairs(8), "first")
    with torch.no_grad():
        mine, whole = parallel(**whole_batch.pairs(8, 1)), reference(**whole_batch.pairs(8, 1))
    assert_close(mine["loss"], whole["loss"], "without gradients")
    assert_close(mine["logits"], whole["logits"], "without gradients")
    for samples in (6, 10):
        _step(parallel, reference, whole_batch.pairs(samples, samples), f"{samples} samples")
    return parallel.plan.pipeline.schedule, parallel._captures.traces


def _experts(rank: int, name: str, mesh: str, strategy: str | None) -> str:
    """Training, with the schedule left to the planner."""
    model, batch = whole_batch.balanced(name, 8)
    options = dict(micro_batches=4, strategy=strategy, outputs="everywhere", hardware="cpu-gloo")
    parallel, reference = pair(model, device_mesh(mesh), batch, **options)
    _step(parallel, reference, batch, name)
    losses = []
    for one in (parallel, reference):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(2):
            loss = one(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss)
    assert_close(*losses, "trained")
    return parallel.plan.pipeline.schedule


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("loss", ["clip", *sorted({*whole_batch.LOSSES} - {"clip"})])
@pytest.mark.parametrize("mesh", ["dp=2", "pp=2"])
def test_losses_of_all_pairs(mesh, loss):
    found = gloo.run(2, _pairs, mesh, loss)
    assert found[0] == found[1] and found[0][0] == "gpipe"


@pytest.mark.gloo
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("mesh, strategy", [("pp=2", None), ("ep=2", "expert"), ("dp=2", "fsdp")])
def test_balance_of_experts(name, mesh, strategy):
    assert gloo.run(2, _experts, name, mesh, strategy) == ["gpipe"] * 2


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("mesh, strategy", [("pp=2,dp=2", None), ("pp=2,ep=2", "expert"), ("dp=2,ep=2", "expert")])
def test_balance_of_experts_on_four_processes(mesh, strategy):
    assert gloo.run(4, _experts, "mixtral", mesh, strategy) == ["gpipe"] * 4


def _scaled(rank: int) -> float:
    """A loss in float16 is scaled before its gradients are made, those of the tail too."""
    model = whole_batch.Pairs("clip")
    reference = copy.deepcopy(model)
    batch = whole_batch.pairs(6)
    options = dict(schedule="gpipe", micro_batches=2, precision="fp16", hardware="cpu-gloo")
    parallel = autopar.compile(model, device_mesh("pp=2"), batch, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(2):
        parallel.zero_grad()
        scaler.scale(parallel(**batch)["loss"]).backward()
    reference(**batch)["loss"].backward()
    for name, parameter in parallel.named_parameters():
        if name == "bias":  # which the loss does not read
            continue
        assert_close(full(parameter.grad) / 1024, dict(reference.named_parameters())[name].grad, name, 2e-2)
    return 0.0


@pytest.mark.slow
@pytest.mark.gloo
def test_a_scaled_loss():
    gloo.run(2, _scaled)
