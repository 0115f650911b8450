"""Python state and copies of a compiled module, against the module itself."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import autopar
from autopar.errors import InputError, StageError
from tests.helpers import gloo

from .parity import assert_close, assert_same_gradients, assert_same_values, device_mesh, pair

pytestmark = pytest.mark.usefixtures("kept")


class Stateful(nn.Module):
    """Reads attributes, a config, a global list, and leaves tensors, counters and buffers behind."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Dropout(0.0), nn.Linear(10, 4))
        self.temperature, self.steps, self.options, self.cache = 2.0, 0, {"scale": 1.0}, None
        self.mask = torch.ones(4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.steps += 1
        if self.cache is None:
            self.cache = torch.full((4,), 0.5)
        y = self.layers(x) * self.temperature * self.options["scale"] * self.mask + self.cache
        with torch.no_grad():
            self.mean.mul_(0.5).add_(y.mean(0), alpha=0.5)
        self.penalty = y.square().mean()
        return {"loss": (y - 1).square().mean(), "y": y}


def batch(seed: int) -> torch.Tensor:
    return torch.randn(6, 6, generator=torch.Generator().manual_seed(seed))


def _script(run, model):
    run(model, 1)
    model.temperature = 3.0
    run(model, 2)
    model.options["scale"], model.layers[2].p = 0.5, 0.0
    run(model, 3)
    model.mask = torch.tensor([1.0, 0.0, 1.0, 0.0])
    run(model, 4)
    model.mask.fill_(2.0)
    for layer in model.modules():
        if isinstance(layer, nn.Tanh):
            layer.register_forward_hook(lambda m, a, out: out * 2)
    run(model, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run(model, 6)


def _call(model, seed):
    out = model(batch(seed))
    y = out["y"] * torch.ones(4)  # a plain tensor beside an output
    (out["loss"] + model.penalty + (y**3).mean()).backward()
    return out


def _state(rank: int, mesh: str, strategy: str | None) -> None:
    torch.manual_seed(0)
    model, reference = pair(Stateful(), device_mesh(mesh), (batch(0),), strategy=strategy)
    seen = []

    def run(m, seed):
        out = _call(m, seed)
        seen.append((out["loss"].detach(), out["y"].detach(), m.penalty.detach(), m.mean.clone(), m.steps, m.cache))

    _script(run, model), _script(run, reference)
    half = len(seen) // 2
    for mine, whole in zip(seen[:half], seen[half:]):
        assert mine[4] == whole[4]
        for a, b in zip(mine[:4] + mine[5:], whole[:4] + whole[5:]):
            assert_close(a, b, tolerance=2e-2 if whole[4] == 6 else 1e-5)
    assert_same_gradients(model, reference, 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("mesh, strategy", [("dp=2", "fsdp"), ("dp=2,tp=2", None)])
@pytest.mark.gloo
def test_state_on_processes(mesh, strategy):
    gloo.run(2 if mesh == "dp=2" else 4, _state, mesh, strategy, seconds=240)


def test_state(alone):
    _state(0, "dp=1,tp=1", None)


def test_modules_are_those_of_the_source(alone):
    model, reference = pair(Stateful(), alone, (batch(0),))
    assert isinstance(model.layers, nn.Sequential) and len(model.layers) == 4 and model.layers[2].p == 0.0
    assert [type(m) for m in list(model.modules())[1:]] == [type(m) for m in list(reference.modules())[1:]]
    model.eval(), reference.eval()
    assert not model.layers[2].training and not model._source.training
    model.layers = nn.Sequential(nn.Linear(6, 4))
    with pytest.raises(InputError, match="not those that it was compiled with"):
        model(batch(1))


def test_captures_that_differ_by_state_say_why(alone):
    model, _ = pair(Stateful(), alone, (batch(0),))
    model(batch(0)), model(batch(0))
    model.temperature = 5.0
    model(batch(0))
    assert [c.partition("train, ")[2] for c in model.captures] == [
        "", "model.cache None -> a tensor (4,)", "model.temperature 2.0 -> 5.0"
    ]  # fmt: skip


def _copies(rank: int, mesh: str, strategy: str | None) -> None:
    model, reference = pair(Stateful(), device_mesh(mesh), (batch(0),), strategy=strategy)
    _call(model, 1), _call(reference, 1)
    model.penalty = reference.penalty = None  # as eager torch, only leaves are copied
    twin, other = copy.deepcopy(model), copy.deepcopy(reference)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, reference)]
    averages = [AveragedModel(m, avg_fn=lambda a, p, n: 0.5 * a + 0.5 * p) for m in (model, reference)]
    for seed in (2, 3):
        for m, optimizer, average in zip((model, reference), optimizers, averages):
            m.zero_grad()
            _call(m, seed)
            optimizer.step()
            m.penalty = None
            average.update_parameters(m)
    twin.temperature = other.temperature = 7.0
    for mine, whole in ((model, reference), (twin, other), (averages[0].module, averages[1].module)):
        assert_same_values(mine, whole)
        assert_close(mine(batch(9))["y"], whole(batch(9))["y"])
        assert mine.steps == whole.steps and mine.temperature == whole.temperature
    model.penalty = None
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for plain in (torch.load(file, weights_only=False), pickle.loads(pickle.dumps(model))):
        assert type(plain) is Stateful
        assert_same_values(model, plain)
        assert_close(plain(batch(9))["y"], reference(batch(9))["y"])
        reference.steps, reference.mean = model.steps, model.mean.clone()


def test_copies(alone):
    _copies(0, "dp=1,tp=1", None)


@pytest.mark.slow
@pytest.mark.gloo
def test_copies_on_processes():
    gloo.run(2, _copies, "dp=2", "fsdp", seconds=240)


def test_a_model_in_a_loop_of_outputs(alone):
    """Outputs are plain tensors for whoever reads them."""
    model, reference = pair(nn.Linear(6, 4), alone, (batch(0),))
    mine, whole = model(batch(1)), reference(batch(1))
    assert mine.flatten().tolist() == pytest.approx(whole.flatten().tolist(), rel=1e-4, abs=1e-6)
    target = torch.ones(6, 4)
    for m in (model, reference):
        torch.nn.functional.mse_loss(m(batch(1)), target).backward()
    assert_same_gradients(model, reference)
    assert autopar.__name__ == "autopar"


def _hooks(rank: int, mesh: str, strategy: str | None) -> None:
    """Hooks of parameters, registered before and after compiling, that return, write in place, and look."""
    mask = torch.arange(60.0).view(10, 6) % 2
    seen: list[float] = []

    def doubled(gradient):
        gradient.mul_(2)

    def before(model):
        model.layers[0].weight.register_hook(lambda g: g * mask)

    def after(model):
        model.layers[0].bias.register_hook(doubled)
        model.layers[3].weight.register_hook(lambda g: g / g.norm())
        model.layers[3].bias.register_hook(lambda g: seen.append(float(g.sum())))

    source, reference = Stateful(), Stateful()
    reference.load_state_dict(source.state_dict())
    before(source), before(reference)
    model = autopar.compile(source, device_mesh(mesh), (batch(0),), strategy=strategy)
    after(model), after(reference)
    for m in (model, reference):
        _call(m, 1)
    assert_same_gradients(model, reference)
    assert seen[0] == pytest.approx(seen[1], rel=1e-4)


@pytest.mark.slow
def test_hooks_of_parameters(alone):
    _hooks(0, "dp=1,tp=1", None)


@pytest.mark.gloo
def test_hooks_of_parameters_on_processes():
    gloo.run(2, _hooks, "dp=2", "fsdp", seconds=120)


def _staged(rank: int) -> None:
    """Under a pipeline a tensor that the forward leaves in an attribute is on all ranks, or there is an error."""
    mesh = device_mesh("pp=2")
    source = Stateful()
    source.cache = torch.full((4,), 0.5)
    with pytest.raises(StageError, match="leaves a tensor in model.penalty"):
        autopar.compile(copy.deepcopy(source), mesh, (batch(0),), micro_batches=1)
    model, reference = pair(source, mesh, (batch(0),), outputs="everywhere", micro_batches=1)
    for seed in (1, 2):
        mine, whole = model(batch(seed)), reference(batch(seed))
        assert_close(mine["loss"], whole["loss"])
        assert_close(model.penalty, reference.penalty)
        assert model.steps == reference.steps
    mine["loss"].backward(), whole["loss"].backward()


@pytest.mark.gloo
def test_state_of_stages():
    gloo.run(2, _staged, seconds=120)


class Noting(nn.Module):
    """Sets a number in each call that it never reads, and counts."""

    def __init__(self):
        super().__init__()
        self.layer, self.rows, self.calls = nn.Linear(6, 4), 0, 0

    def forward(self, x):
        self.rows = x.shape[0]
        self.calls += 1
        return self.layer(x)


def test_a_number_that_is_set_is_no_counter(alone):
    parallel, reference = pair(Noting(), alone, (batch(0),))
    for seed in range(3):
        for m in (parallel, reference):
            m(batch(seed))
        assert (parallel.rows, parallel.calls) == (reference.rows, reference.calls) == (6, seed + 1)
    assert len(parallel.captures) == 1
