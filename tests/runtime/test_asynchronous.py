"""Asynchronous pipelines against a simulation of the same stale updates in plain torch, loss by loss and weight by
weight.

The oracle knows no graphs and no sends: a gradient is autograd's of the whole model, called with each weight in the
version that the papers give its stage, and optimizers step what is newest.
"""

from __future__ import annotations

import copy
import hashlib

import pytest
import torch
from torch import nn
from torch.func import functional_call

import autopar
from autopar.errors import InputError, MeshError, StageError, StrategyError
from autopar.models.output import Output
from autopar.passes.pipeline.micro_batch import micro_batch
from autopar.runtime.asynchronous_stage import AsynchronousStage
from autopar.runtime.weight_versions import WeightVersions
from autopar.schedule.asynchronous import BUFFERED, NAMES, STASHING, VERTICAL, Asynchronous
from tests.helpers import gloo, staged
from tests.helpers.simulated_asynchronous import SimulatedAsynchronous

from . import tiny
from .parity import device_mesh, full

GPT = "gpt:layers=4,hidden=16,heads=2,vocab=32,seq=8,tied=false"
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.2, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
}


def build(text: str = GPT):
    model, inputs = tiny.own(text, batch=4, seq=8)
    return model.double(), {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


def batches_like(inputs: dict, count: int) -> list[dict]:
    """Other samples in each, and other numbers of tokens that count."""
    draw, found = torch.Generator().manual_seed(7), []
    for k in range(count):
        batch = {n: torch.randint(0, 32, x.shape, generator=draw) if x.dtype == torch.long else
                 torch.randn(x.shape, generator=draw, dtype=x.dtype) for n, x in inputs.items()}  # fmt: skip
        if "labels" in batch:
            batch["labels"][:, : k % 3] = -100
            batch["labels"][0, : 2 + k % 4] = -100
        found.append(batch)
    return found


def stale_training(model: nn.Module, stage_of: dict[str, int], name: str, batches: list[dict], optimizer):
    """(losses, weights by stage and version): one process, one batch after the other."""
    p, losses = 1 + max(stage_of.values()), []
    mine = {n: nn.Parameter(w.detach().clone()) for n, w in model.named_parameters()}
    optimizers = [optimizer([w for n, w in mine.items() if stage_of[n] == s]) for s in range(p)]
    history = [{n: w.detach().clone() for n, w in mine.items()}]
    for t, batch in enumerate(batches):
        late = {STASHING: lambda s: p - 1 - s, VERTICAL: lambda s: p - 1, BUFFERED: lambda s: 1}[name]
        stale = {n: history[max(0, t - late(stage_of[n]))][n].requires_grad_() for n in mine}
        loss = functional_call(model, stale, (), batch).loss
        for w, gradient in zip(mine.values(), torch.autograd.grad(loss, list(stale.values()))):
            w.grad = gradient
        for one in optimizers:
            one.step()
        losses.append(loss.item())
        history.append({n: w.detach().clone() for n, w in mine.items()})
    return losses, history


def simulated(name: str, mesh: str, batch_count: int, optimizer: str, strategy: str = "auto", text: str = GPT,
              group: int | None = None, built=None, precision: str = "fp32"):  # fmt: skip
    """A simulation after a run, with its losses and the weights after every update by (stage, version), and the
    oracle's."""
    stages = autopar.Mesh.parse(mesh).size("pp")
    schedule = Asynchronous(name, stages, group or (stages if name == BUFFERED else 1))
    model, inputs = built or build(text)
    case = staged.Case.of(model, inputs, wide=False, precision=precision)
    plan = staged.plan_of(
        micro_batch(case.captured, schedule.group), mesh, "1f1b", strategy=strategy, precision=precision
    )
    simulation = SimulatedAsynchronous(case.captured, plan, schedule, case.values, OPTIMIZERS[optimizer])
    leaves = {n.meta["role"].name: n.name for n in case.captured.graph.nodes
              if n.op == "placeholder" and n.meta["role"].kind == "input"}  # fmt: skip
    batches, found = batches_like(inputs, batch_count), {}

    def on_update(stage: int, version: int) -> None:
        found[stage, version] = simulation.parameters(stage)

    losses = simulation.run([{leaves[n]: x for n, x in b.items()} for b in batches], on_update)
    stage_of = {n: s for s, stage in enumerate(simulation.stages) for n in stage.program.stage.parameters}
    return simulation, losses, found, stale_training(model, stage_of, name, batches, OPTIMIZERS[optimizer])


def check(losses, found, oracle, tolerance: float = 1e-10) -> None:
    wanted, history = oracle
    torch.testing.assert_close(
        torch.tensor([float(x) for x in losses]), torch.tensor(wanted), rtol=tolerance, atol=tolerance
    )
    assert {n for (_, version), weights in found.items() if version == 1 for n in weights} == set(history[0])
    for (stage, version), weights in found.items():
        for n, w in weights.items():
            note = f"{n} of stage {stage}, version {version}"
            torch.testing.assert_close(w, history[version][n].detach(), rtol=tolerance, atol=tolerance, msg=note)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name, mesh, optimizer, strategy, group", [
    (STASHING, "pp=2", "sgd", "auto", None),
    (STASHING, "pp=4", "adamw", "auto", None),
    (STASHING, "pp=2,dp=2", "momentum", "fsdp", None),
    (VERTICAL, "pp=4", "momentum", "auto", None),
    (VERTICAL, "pp=2,tp=2", "adamw", "megatron_sp", None),
    (BUFFERED, "pp=2", "adamw", "auto", 4),
    (BUFFERED, "pp=4", "sgd", "auto", None),
    (BUFFERED, "pp=2,dp=2", "momentum", "zero1", None),
])  # fmt: skip
def test_against_stale_training(name, mesh, optimizer, strategy, group):
    simulation, losses, found, oracle = simulated(name, mesh, 8, optimizer, strategy, group=group)
    check(losses, found, oracle)
    assert len(found) == 8 * len(simulation.stages)
    for s, stage in enumerate(simulation.stages):
        assert {rank.versions.most for rank in stage.ranks} == {simulation.schedule.versions_held(s)}
        assert {rank.versions.alive for rank in stage.ranks} == {1}  # the pipeline ran empty


@pytest.mark.slow
def test_casts_are_of_the_version_that_is_read():
    """In bf16, up to its rounding: each micro-batch makes its own, where those of a synchronous step share them."""
    _, losses, found, oracle = simulated(
        BUFFERED, "pp=2", 4, "sgd", built=tiny.own(GPT, batch=4, seq=8), group=4, precision="bf16"
    )
    check(losses, found, oracle, tolerance=5e-3)


def test_it_is_not_synchronous_training():
    """The oracle tells the schedules apart, and each from training without delay."""
    model, inputs = build()
    stage_of = {n: int("h.2" in n or "h.3" in n or "ln_f" in n or "lm_head" in n) for n, _ in model.named_parameters()}
    batches = batches_like(inputs, 5)
    losses = {name: stale_training(model, stage_of, name, batches, OPTIMIZERS["sgd"])[0] for name in NAMES}
    reference, wanted = copy.deepcopy(model), []
    optimizer = OPTIMIZERS["sgd"](reference.parameters())
    for batch in batches:
        loss = reference(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    assert losses[VERTICAL] == losses[BUFFERED]  # with two stages both are one update late everywhere
    assert losses[STASHING][0] == wanted[0] and abs(losses[STASHING][1] - wanted[1]) > 1e-4
    assert abs(losses[STASHING][2] - losses[VERTICAL][2]) > 1e-4 and abs(losses[VERTICAL][2] - wanted[2]) > 1e-4


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", NAMES)
def test_forward_and_backward_see_the_same_bits(name, monkeypatch):
    """A backward begins with the same bits that its forward saved, weights among them; another micro-batch's differ."""
    saved: dict[tuple[int, int], str] = {}
    weights: dict[tuple[int, int], str] = {}
    checked = []
    forward, backward = AsynchronousStage.forward, AsynchronousStage.backward

    def watched_forward(stage, i, arrived):
        result = forward(stage, i, arrived)
        version = stage.schedule.version_of(stage.index, i)
        weights[stage.index, i] = digest(stage.ranks[0].versions.at(version).values())
        saved[stage.index, i] = digest(stage.saved[i][0])
        return result

    def watched_backward(stage, i, arrived):
        version = stage.schedule.version_of(stage.index, i)
        assert digest(stage.ranks[0].versions.at(version).values()) == weights[stage.index, i]
        assert digest(stage.saved[i][0]) == saved[stage.index, i]
        checked.append((stage.index, i))
        return backward(stage, i, arrived)

    monkeypatch.setattr(AsynchronousStage, "forward", watched_forward)
    monkeypatch.setattr(AsynchronousStage, "backward", watched_backward)
    simulation, *_ = simulated(name, "pp=4", 6, "sgd")
    schedule = simulation.schedule
    assert len(checked) == 4 * 6 * schedule.group
    for stage in range(4):
        versions = {schedule.version_of(stage, i) for i in range(6 * schedule.group)}
        assert len({weights[stage, i] for i in range(6 * schedule.group)}) == len(versions) > 1


def digest(tensors) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


@pytest.mark.slow
def test_a_run_gives_the_same_bits_again():
    first, second = (simulated(STASHING, "pp=2", 4, "adamw")[1:3] for _ in range(2))
    assert [x.item() for x in first[0]] == [x.item() for x in second[0]]
    assert all(torch.equal(w, second[1][key][n]) for key, weights in first[1].items() for n, w in weights.items())


def test_versions_never_write_into_each_other():
    weight = nn.Parameter(torch.zeros(3))
    versions, given = WeightVersions({"w": weight}), {}

    def step():
        weight.data.add_(1.0)

    for version in range(5):  # the last two are always needed
        given[version] = versions.at(version)["w"]
        versions.advance(step, {version - 1, version})
        assert versions.alive == versions.most == min(3, version + 2)
    assert [w[0].item() for w in given.values()] == [0.0, 1.0, 2.0, 3.0, 4.0] and weight[0].item() == 5.0
    assert len({w.data_ptr() for w in given.values()}) == 5
    with pytest.raises(KeyError):
        versions.at(2)
    before = weight.data_ptr()
    versions.advance(step, ())  # nobody reads it any more: in place
    assert weight.data_ptr() == before and versions.alive == 1


class Normed(nn.Module):
    """Its buffers follow the micro-batches in their order, on whatever stage they are."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(4)))

    def forward(self, x, target):
        return Output(nn.functional.mse_loss(self.layers(x), target), None)


def test_buffers_follow_the_micro_batches():
    model, inputs = Normed().double(), dict(x=torch.randn(8, 6).double(), target=torch.randn(8, 6).double())
    simulation, losses, found, oracle = simulated(STASHING, "pp=4", 7, "sgd", built=(model, inputs))
    check(losses, found, oracle)
    mine = {n: b for stage in simulation.stages for n, b in stage.ranks[0].fixed.items()}
    moved = [n for n, b in model.named_buffers() if b.is_floating_point()]
    assert len(moved) == 8
    for n in moved:
        torch.testing.assert_close(mine[n], model.get_buffer(n), rtol=1e-10, atol=1e-10)


def test_shared_weights_are_refused():
    with pytest.raises(StageError, match="stages share .*wte.weight"):
        simulated(
            STASHING, "pp=2", 1, "sgd", text=GPT.replace("layers=4", "layers=2").replace("tied=false", "tied=true")
        )


# on gloo
# -----------------------------------------------------------------------------------------------------------------


def _train(rank: int, mesh: str, name: str, **options) -> tuple[autopar.AsynchronousPipeline, list, nn.Module]:
    """A run against the oracle: the pipeline, its losses, and the oracle's model."""
    model, inputs = build()
    batches, reference = batches_like(inputs, 6), copy.deepcopy(model)
    pipeline = autopar.AsynchronousPipeline(
        model, device_mesh(mesh), inputs, name, optimizer=OPTIMIZERS["adamw"], **options
    )
    found, stage = {}, pipeline.pp_rank
    mine = {n: p for n, p in pipeline.module.named_parameters()}

    def on_update(version: int) -> None:
        found[stage, version] = {n: full(p).detach().clone() for n, p in mine.items()}

    losses = pipeline.run(iter(batches), on_update)
    stage_of = {n: s for s, names in enumerate(pipeline.plan.pipeline.owners) for n in names}
    wanted, history = stale_training(reference, stage_of, name, batches, OPTIMIZERS["adamw"])
    assert losses == pytest.approx(wanted, abs=1e-10)
    assert sorted(found) == [(stage, version) for version in range(1, 7)] and {stage_of[n] for n in mine} == {stage}
    for (_, version), weights in found.items():
        for n, w in weights.items():
            torch.testing.assert_close(w, history[version][n].detach(), rtol=1e-9, atol=1e-9)
    assert pipeline.most_versions == pipeline.schedule.versions_held(stage) and pipeline.versions_alive == 1
    reference.load_state_dict(history[-1], strict=False)
    return pipeline, losses, reference


def _buffered_on_two(rank: int) -> int:
    model, inputs = build()
    mesh, sgd = device_mesh("pp=2"), OPTIMIZERS["sgd"]
    with pytest.raises(StrategyError, match="after every micro-batch"):
        autopar.AsynchronousPipeline(model, mesh, inputs, optimizer=sgd, micro_batches=2)
    with pytest.raises(MeshError, match="axis pp"):
        autopar.AsynchronousPipeline(model, device_mesh("dp=2"), inputs, optimizer=sgd)
    pipeline, _, reference = _train(rank, "pp=2", BUFFERED, micro_batches=4)
    with torch.no_grad():  # the module has the newest weights
        assert pipeline.module(**inputs).loss.item() == pytest.approx(reference(**inputs).loss.item(), abs=1e-9)
    with pytest.raises(InputError, match="not of the form"):
        pipeline.run([{k: v[:2] for k, v in inputs.items()}])
    assert pipeline.run([]) == [] and pipeline.run([inputs]) == [
        pytest.approx(reference(**inputs).loss.item(), abs=1e-9)
    ]
    return pipeline.stage.ranks[0].versions.newest


def _stashing_on_four(rank: int) -> tuple[int, list]:
    pipeline, losses, _ = _train(rank, "pp=4", STASHING)
    sharded, _, _ = _train(rank, "pp=2,dp=2", VERTICAL, strategy="fsdp")
    assert sharded.most_versions == 2
    return pipeline.most_versions, losses


@pytest.mark.slow
@pytest.mark.gloo
def test_two_stages_on_gloo():
    assert gloo.run(2, _buffered_on_two, seconds=240) == [1, 1]


@pytest.mark.slow
@pytest.mark.gloo
def test_four_stages_and_sharded_stages_on_gloo():
    found = gloo.run(4, _stashing_on_four, seconds=240)
    assert [most for most, _ in found] == [4, 3, 2, 1] and all(losses == found[0][1] for _, losses in found)
