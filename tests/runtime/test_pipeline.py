"""Pipelines on gloo: a call is the whole batch on one process, whatever the schedule, and the training loop is any
module's."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor

import autopar
from autopar.errors import InputError, MicroBatchError, StageError
from tests.helpers import gloo

from . import tiny
from .parity import assert_close, device_mesh, full, pair


def _uneven(batch: dict) -> dict:
    """Labels of which each sample counts another number of tokens: a mean of the micro-batches' means is another
    loss."""
    labels = batch["input_ids"].clone()
    for i in range(len(labels)):
        labels[i, : 2 * i + 1] = -100
    return {**batch, "labels": labels}


def _assert_gradients(parallel, reference, tolerance: float = 1e-5) -> None:
    """Those of this rank's parameters are the reference's, and every parameter is on some rank."""
    wanted, names = dict(reference.named_parameters()), [n for n, _ in parallel.named_parameters()]
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, names)
    assert {*sum(everyone, [])} == {*wanted}
    for name, parameter in parallel.named_parameters():
        assert_close(parameter.grad, wanted[name].grad, name, tolerance)


def _schedules(rank: int, names: list[str], mesh: str) -> int:
    for name in names:
        model, batch = tiny.gpt2()
        batch = _uneven(batch)
        parallel, reference = pair(model, device_mesh(mesh), batch, schedule=name, micro_batches=4)
        assert parallel.plan.pipeline.schedule == name
        loss, expected = parallel(**batch).loss, reference(**batch).loss
        assert_close(loss, expected, name)
        loss.backward()
        expected.backward()
        _assert_gradients(parallel, reference)
        measured = parallel.measured_schedule()
        assert [*measured.schedule.orders] == [*parallel.plan.pipeline.orders.orders] and 0 < measured.bubble < 1
    return len(names)


def _frozen(rank: int) -> list[str]:
    """A rank may have nothing that trains."""
    model, batch = tiny.llama(num_hidden_layers=1)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lm_head" in name)
    parallel, reference = pair(model, device_mesh("pp=2"), batch, micro_batches=2, schedule="1f1b")
    loss, expected = parallel(**batch).loss, reference(**batch).loss
    loss.backward()
    expected.backward()
    trained = [name for name, p in parallel.named_parameters() if p.requires_grad]
    for name in trained:
        assert_close(parallel.get_parameter(name).grad, reference.get_parameter(name).grad, name)
    return trained


@pytest.mark.gloo
def test_a_stage_of_frozen_parameters():
    assert sorted(gloo.run(2, _frozen)) == [[], ["lm_head.weight"]]


MORE = pytest.param(["1f1b", "gpipe", "interleaved_zero_bubble"], marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("names", [["zbv"], MORE])  # all of them: tests/simulate/test_pipeline.py
def test_schedules_on_two_ranks(names):
    assert gloo.run(2, _schedules, names, "pp=2", seconds=240) == [len(names)] * 2


def _train(rank: int, mesh: str, strategy: str | None) -> float:
    """SGD with momentum, evaluation, a smaller batch; what other outputs are. With ZeRO-1 micro-batches share the
    weights that every step gathers anew."""
    model, batch = tiny.gpt2(n_layer=1)
    batch = _uneven(batch)
    options = dict(micro_batches=2, schedule="1f1b", strategy=strategy)
    parallel, reference = pair(model, device_mesh(mesh), batch, **options)
    assert (parallel.plan.memory.get("gathered parameters kept", 0) > 0) == (strategy == "zero1")
    is_last = parallel.plan.mesh.coordinate(rank)["pp"] == parallel.plan.pipeline.orders.rank_of_stage[-1]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (parallel, reference)]
    for step in range(2):
        output, expected = parallel(**batch), reference(**batch)
        assert_close(output.loss, expected.loss, f"loss of step {step}", 1e-4)
        assert (output.logits is None) == (not is_last)
        if output.logits is not None:
            assert_close(output.logits, expected.logits, "logits in the order of the batch", 1e-4)
        (output.loss / 2).backward()
        (expected.loss / 2).backward()
        if step == 0:
            _assert_gradients(parallel, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    measured = parallel.measured_schedule()
    assert [*measured.schedule.orders] == [*parallel.plan.pipeline.orders.orders] and 0 < measured.bubble < 1
    smaller = {k: v[:2] for k, v in batch.items()}
    for m in (parallel, reference):
        m.eval()
    with torch.no_grad():
        assert_close(parallel(**smaller).loss, reference(**smaller).loss, "evaluation of two samples", 1e-4)
    parallel.train()
    reference.train()
    loss, expected = parallel(**smaller).loss, reference(**smaller).loss
    loss.backward()
    expected.backward()
    _assert_gradients(parallel, reference, 1e-4)
    loss = parallel(**batch).loss
    loss.backward(retain_graph=True)
    with pytest.raises(InputError, match="second backward"):
        loss.backward()
    assert sum(full(p).numel() for p in parallel.parameters()) < sum(p.numel() for p in reference.parameters())
    return loss.item()


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize("mesh, ranks, strategy", [("pp=2", 2, None), ("pp=2,dp=2", 4, "zero1")])
def test_training_with_evaluation_and_other_batches(mesh, ranks, strategy):
    losses = gloo.run(ranks, _train, mesh, strategy)
    assert losses == [losses[0]] * ranks


def _lora(rank: int, mesh: str) -> int:
    """Every adapter's gradient is PEFT's on one process, with adapters that do something."""
    import peft

    model, batch = tiny.llama(num_hidden_layers=1)
    batch, settings = _uneven(batch), dict(r=4, lora_alpha=12, target_modules=["q_proj", "o_proj", "down_proj"])
    reference = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**settings))
    parallel = autopar.compile(model, device_mesh(mesh), batch, adapt=[autopar.LoRA(**settings)], micro_batches=2)
    wanted = {n.removeprefix("base_model.model.").replace(".default", ""): p for n, p in reference.named_parameters()}
    trained = [name for name, p in parallel.named_parameters() if p.requires_grad]
    with torch.no_grad():
        for name, parameter in sorted(wanted.items()):
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) / 10)
        for name in trained:
            mine = parallel.get_parameter(name)
            mine.copy_(distribute_tensor(wanted[name].detach(), mine.device_mesh, mine.placements))
    loss, expected = parallel(**batch).loss, reference(**batch).loss
    assert_close(loss, expected, "loss with adapters")
    loss.backward()
    expected.backward()
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, trained)
    assert {*sum(everyone, [])} == {name for name, p in wanted.items() if p.requires_grad}
    for name in trained:
        assert_close(parallel.get_parameter(name).grad, wanted[name].grad, name)
    return len(trained)


@pytest.mark.gloo
@pytest.mark.parametrize("mesh, ranks", [("pp=2", 2), pytest.param("pp=2,tp=2", 4, marks=pytest.mark.slow)])
def test_adapters_in_stages(mesh, ranks):
    pytest.importorskip("peft")
    assert min(gloo.run(ranks, _lora, mesh)) > 0


def _refusals(rank: int) -> bool:
    mesh, (x, target) = device_mesh("pp=2"), tiny.Regressor.batch(4)
    with pytest.raises(StageError, match="scalar loss"):
        autopar.compile(tiny.Regressor(), mesh, (x,))
    with pytest.raises(MicroBatchError, match="a batch of 4"):
        autopar.compile(tiny.Regressor(loss=True), mesh, dict(x=x, target=target), micro_batches=5)
    return True


@pytest.mark.gloo
def test_what_a_pipeline_refuses():
    assert gloo.run(2, _refusals) == [True, True]
