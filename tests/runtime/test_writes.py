"""Tests of what the forward writes to in place: parameters, buffers and the caller's own tensors."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import autopar
from autopar.errors import CaptureError, InputError, StageError
from autopar.simulate.compare import verify_model
from tests.helpers import gloo

from .parity import assert_close, assert_same_gradients, assert_same_values, device_mesh, full, pair, planned


class Momentum(nn.Module):
    """A student and a teacher that follows it, as in MoCo and BYOL."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.student = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        with torch.no_grad():
            for parameter in self.teacher.parameters():
                parameter.mul_(0.5)

    def forward(self, x, y):
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.student.parameters()):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            target = self.teacher(y)
        found = self.student(x)
        return {"loss": (found - target).square().mean(), "found": found}


class Normed(nn.Module):
    """An embedding whose rows are kept short, a weight that is clamped before it is read, and one after."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(12, 8, max_norm=1.0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids):
        with torch.no_grad():
            self.first.weight.clamp_(-0.1, 0.1)
            self.calls += 1
        y = self.last(torch.tanh(self.first(self.embed(ids))))
        return y.square().mean()


class Writing(nn.Module):
    """Writes to two of its inputs, to the one before it reads it and to the other after."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 4)

    def forward(self, x, mask):
        x.mul_(2)
        y = self.layer(x).masked_fill(mask.clone(), 0.0)
        mask.logical_not_()
        return y.square().mean()


def pairs_of(size: int = 8):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 6, generator=generator), torch.randn(size, 6, generator=generator)


def ids_of(size: int = 8):
    return (torch.randint(0, 12, (size, 3), generator=torch.Generator().manual_seed(1)),)


def written_of(size: int = 8):
    x, y = pairs_of(size)
    return x, y[:, :4] > 0


MODELS = {"momentum": (Momentum, pairs_of), "normed": (Normed, ids_of), "writing": (Writing, written_of)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "dp=2,tp=2", "dp=3"])
@pytest.mark.parametrize("strategy", [None, "fsdp", "megatron"])
def test_simulated(name, mesh, strategy):
    build, arguments = MODELS[name]
    model, values = build(), arguments(6)
    before = copy.deepcopy(model.state_dict()), copy.deepcopy(values)
    report = verify_model(model, values, mesh, strategy=strategy)
    assert report.match, str(report)
    wanted = {"momentum": "teacher.*.weight", "normed": "embed.weight", "writing": "input args[0]"}
    assert wanted[name] in report.buffer_errors
    for old, new in zip((*before[0].values(), *before[1]), (*model.state_dict().values(), *values)):
        assert torch.equal(old, new)


def _step(parallel, reference, mine, whole, lr: float = 0.1):
    losses = []
    for model, arguments in ((parallel, mine), (reference, whole)):
        model.zero_grad()
        output = model(*arguments)
        losses.append(output["loss"] if isinstance(output, dict) else output)
        losses[-1].backward()
    assert_close(*losses)
    assert_same_gradients(parallel, reference)
    for model in (parallel, reference):
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr).step()
    assert_same_values(parallel, reference)
    for (name, mine_), whole_ in zip(parallel.named_buffers(), reference.buffers()):
        assert_close(mine_, whole_, name)


def _check(mesh, name, **options):
    build, arguments = MODELS[name]
    parallel, reference = pair(build(), mesh, arguments(7), **options)
    for _ in range(3):
        mine, whole = arguments(7), arguments(7)
        versions = [p._version for p in parallel.parameters()]
        _step(parallel, reference, mine, whole)
        for a, b, original in zip(mine, whole, arguments(7)):
            assert torch.equal(a, b) and torch.equal(a, original) == (name != "writing")
    assert versions != [p._version for p in parallel.parameters()]
    mine, whole = arguments(7), arguments(7)
    with torch.no_grad():  # in evaluation too
        assert_close(*(o["loss"] if isinstance(o, dict) else o for o in (parallel(*mine), reference(*whole))))
    assert_same_values(parallel, reference)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MODELS)
def test_alone(alone, name):
    _check(alone, name)


def _distributed(rank, mesh, strategy):
    for name in MODELS:
        _check(device_mesh(mesh), name, strategy=strategy)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("mesh, strategy", [("dp=2", "fsdp"), ("tp=2", None), ("dp=2,tp=2", "megatron")])
def test_on_processes(mesh, strategy):
    gloo.run(4 if "," in mesh else 2, _distributed, mesh, strategy)


def _forms(rank, plan):
    """The caller's tensors: parts of the batch, and DTensors."""
    mesh, (x, mask) = device_mesh("dp=2,tp=2"), written_of()
    part = slice(4 * (rank // 2), 4 * (rank // 2) + 4)
    wanted, flipped = 2 * x, ~mask
    local = autopar.compile(Writing(), mesh, (x[part], mask[part]), inputs="local")
    mine = x[part].clone(), mask[part].clone()
    local(*mine)
    assert torch.equal(mine[0], wanted[part]) and torch.equal(mine[1], flipped[part])
    model = autopar.compile(Writing(), mesh, (x, mask), plan=plan)
    for placements in ([Shard(0), Shard(0)], [Shard(0), Shard(1)], model.shard_inputs(x)[0].placements):
        mine = distribute_tensor(x.clone(), mesh, placements)
        model(mine, mask.clone())
        assert torch.equal(mine.full_tensor(), wanted) and tuple(mine.placements) == tuple(placements)


@pytest.mark.slow
@pytest.mark.gloo
def test_forms_of_inputs_on_four_processes():
    gloo.run(4, _forms, planned(Writing(), "dp=2,tp=2", written_of(), strategy="megatron"))


def test_gradients_of_other_outputs_do_not_write_twice(alone):
    x, y = pairs_of()
    parallel, reference = pair(Momentum(), alone, (x, y))
    for _ in range(3):
        for model in (parallel, reference):
            out = model(x, y)
            (out["loss"] + full(out["found"]).square().sum()).backward()
        assert_same_gradients(parallel, reference)
        assert_same_values(parallel, reference)


def test_what_eager_torch_refuses(alone):
    """A leaf that requires a gradient cannot be written to; a tensor that is passed twice is one tensor."""
    x, mask = written_of()
    with pytest.raises(CaptureError, match="leaf Variable that requires grad"):
        autopar.compile(Writing(), alone, (x.clone().requires_grad_(), mask))

    class Two(Writing):
        def forward(self, x, other):
            x.mul_(2)
            return (self.layer(x) + self.layer(other)).sum()

    model = autopar.compile(Two(), alone, (x, x.clone()))
    with pytest.raises(InputError, match=r"writes to args\[0\], which shares its memory with another input"):
        model(x, x)
    model(x, x.clone())


@pytest.mark.parametrize("name", ["momentum", "normed", "writing"])
def test_pipelines_say_no(name):
    build, arguments = MODELS[name]
    with pytest.raises(StageError, match="writes to .* in place, and each micro-batch would"):
        autopar.plan(build(), "pp=2", arguments(), hardware="cpu-gloo", micro_batches=2)


def test_a_write_to_what_the_backward_reads(alone):
    """Eager torch refuses it in the backward, autopar when it compiles."""

    class After(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.frozen = nn.Linear(6, 6), nn.Linear(6, 4).requires_grad_(False)

        def forward(self, x):
            y = self.frozen(self.first(x)).square().mean()
            with torch.no_grad():
                self.frozen.weight.mul_(3)
            return y

    with pytest.raises(CaptureError, match="modified by an inplace operation(.|\n)*before it is read, or to a clone"):
        autopar.compile(After(), alone, pairs_of()[:1])
