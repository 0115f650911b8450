"""`autopar.plan` needs no process group, no device and no weights; what compile and plan share is checked here."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.errors import HardwareError, InputError, MemoryInfeasibleError, MeshError, StrategyError
from autopar.planner.options import bytes_of_text

from ..runtime import tiny

OPTIONS = dict(hardware="cpu-gloo", baselines=False)


def batch():
    x, target = tiny.Regressor.batch()
    return dict(x=x, target=target)


def test_plan_of_a_model_without_weights():
    assert not dist.is_initialized() or dist.get_world_size() == 1
    real = autopar.plan(tiny.Regressor(loss=True), "dp=2,tp=2", batch(), **OPTIONS)
    with torch.device("meta"):
        model = tiny.Regressor(loss=True)
    meta = autopar.plan(
        model, autopar.Mesh.parse("dp=2,tp=2"), {k: v.to("meta") for k, v in batch().items()}, **OPTIONS
    )
    assert real == meta and real.hash == meta.hash and str(real) == str(meta)
    assert set(real.layouts) == {"up.weight", "up.bias", "down.weight", "down.bias", "x", "target"}


def test_planning_leaves_the_model_alone():
    model = tiny.Regressor(loss=True)
    before = copy.deepcopy(model.state_dict())
    autopar.plan(model, "dp=2", batch(), precision="bf16", **OPTIONS)
    assert all(torch.equal(v, before[k]) and v.dtype == torch.float32 for k, v in model.state_dict().items())
    model(**batch()).loss.backward()


def test_pins_are_followed():
    plan = autopar.plan(
        tiny.Regressor(loss=True), "dp=2,tp=2", batch(), pin={"*.weight": "tp:S(1)", "up.bias": "R"}, **OPTIONS
    )
    weights = [plan.layouts[f"{name}.weight"] for name in ("up", "down")]  # stored in parts over dp or not
    assert all(layout.endswith("tp:S(1)") for layout in weights) and plan.layouts["up.bias"] == "R"


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(mesh=0), MeshError, "positive"),
        (dict(mesh=True), MeshError, "cannot read a bool as a mesh"),
        (dict(mesh="dp=0"), MeshError, "positive"),
        (dict(memory="1 potato"), StrategyError, "cannot read '1 potato' as a memory limit"),
        (dict(memory="1..5GB"), StrategyError, "cannot read '1..5GB' as a memory limit"),
        (dict(memory="1e400"), StrategyError, "cannot read '1e400'"),
        (dict(memory=-1), StrategyError, "cannot read -1"),
        (dict(memory="64B"), MemoryInfeasibleError, "fix: "),
        (dict(strategy="megatronn"), StrategyError, "use megatron"),
        (dict(pin={"up.weight": "tp:S(7)"}), StrategyError, "use a dim below 2"),
        (dict(pin={"up.weight": "tp:Q"}), StrategyError, "cannot read 'tp:Q' as a placement"),
        (dict(hardware="abacus"), HardwareError, "abacus"),
        (dict(precision={}), StrategyError, "no precision {} is known"),
        (dict(pin="*=R"), StrategyError, "cannot read '\\*=R' as pins"),
        (dict(example_inputs="text"), InputError, "example_inputs must be a dict"),
    ],
)
def test_mistakes(options, error, message):
    arguments = dict(mesh="dp=2,tp=2", example_inputs=batch()) | OPTIONS | options
    with pytest.raises(error, match=message):
        autopar.plan(tiny.Regressor(loss=True), **arguments)


@pytest.mark.parametrize(
    "model, message",
    [
        (lambda x: x, "the model is a function, not a torch.nn.Module"),
        (torch.nn.LazyLinear(3), "weight has no shape yet(.|\n)*call the model once"),
        (torch.nn.Linear(6, 3, dtype=torch.complex64), "weight is complex"),
    ],
)
def test_models_that_cannot_be_planned(model, message):
    with pytest.raises(InputError, match=message):
        autopar.plan(model, "dp=2", (batch()["x"],), **OPTIONS)


@pytest.mark.parametrize("model", [torch.nn.Identity(), torch.nn.ReLU()])
def test_models_that_compute_little(model):
    plan = autopar.plan(model, "dp=2", (batch()["x"],), **OPTIONS)
    assert 0.0 <= plan.gap < 1e-3 and str(plan)


@pytest.mark.parametrize(
    "text, bytes_",
    [
        ("40GiB", 40 * 2**30),
        ("80 GiB", 80 * 2**30),
        ("80Gi", 80 * 2**30),
        ("1.5 gb", 1.5e9),
        ("80G", 80e9),
        ("80 GB", 80e9),
        ("512m", 512e6),
        ("7B", 7.0),
        (1000, 1000.0),
        ("2e9", 2e9),
        (None, None),
    ],
)
def test_memory_limits(text, bytes_):
    assert bytes_of_text(text) == bytes_
