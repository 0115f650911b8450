"""Fake-quantized stacks of experts under expert axes: outputs and every gradient are those of torch's own op on the
weight of each expert, in fp64."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import nn

import autopar
from autopar.adapt import order
from autopar.errors import AdaptError
from autopar.hardware.profile import load
from autopar.ir.mesh import Mesh
from autopar.planner.spmd.batch import in_micro_batches
from autopar.planner.spmd.plan import search
from autopar.planner.spmd.plan_options import PlanOptions
from autopar.simulate.oracle import global_values, relative_error
from autopar.simulate.pipeline import simulate_pipeline
from tests.helpers.mixture import Mixture

from .adapted import traced
from .eager_quant import eager_quantized, gradients

FAKE = torch.ops.autopar.fake_quantize.default
GRIDS = {
    "group": dict(dtype="int4", group_size=8),
    "channel": dict(dtype="int8"),
    "asymmetric": dict(dtype="int4", mapping_type="asymmetric"),
    "groups of two, asymmetric": dict(dtype="int2", group_size=2, mapping_type="asymmetric"),
    "learned": dict(dtype="int4", range_learning=True),
    "learned by group": dict(dtype="int3", group_size=4, range_learning=True),
}
MESHES = {"ep=2": "expert", "dp=2,ep=2": "expert+zero1", "tp=2": None, "dp=4": "fsdp", "ep=4": "expert"}
KINDS = ("mixtral", "gpt_oss")


def quantizing(grid: str, **options) -> tuple:
    return order.checked(autopar.FakeQuant(**GRIDS[grid], target_parameters=["gate_up_proj", "down_proj"], **options))


def check(model: Mixture, adapt: tuple, mesh: str, strategy: str | None, micro_batches: int, note: object) -> None:
    x = torch.randn(6, 5, 16, dtype=torch.float64)
    order.attach(model, adapt, "cpu")
    eager = eager_quantized(model.double())  # trained scales too
    wanted = eager(x)
    wanted["loss"].backward()
    expected = gradients(eager)
    captured = traced(model, (x,), adapt)
    options = PlanOptions(load("cpu-gloo"), strategy=strategy, baselines=False, micro_batches=micro_batches)
    plan = in_micro_batches(captured, options, lambda one, o: search(one, Mesh.parse(mesh), o)).plan
    step = simulate_pipeline(captured, plan, global_values(captured, model, (x,)))
    assert step.gradients.keys() == expected.keys()
    errors = {n: relative_error(step.gradients[n], gradient) for n, gradient in expected.items()}
    errors |= {str(i): relative_error(step.outputs[str(i)], value) for i, value in enumerate(wanted.values())}
    assert max(errors.values()) < 1e-10, (note, errors)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("grid", GRIDS)
def test_gradients_are_those_of_each_expert(grid, mesh, kind):
    check(Mixture(kind), quantizing(grid), mesh, MESHES[mesh], 1, (grid, mesh, kind))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_routing_and_micro_batches(seed):
    """Experts without tokens, experts with all of them; the weights are rounded in each micro-batch."""
    random = Random(seed)
    grid, mesh, kind = random.choice([*GRIDS]), random.choice([*MESHES]), random.choice(KINDS)
    count, bias = random.choice([1, 2, 4]), random.choice([0.0, 50.0])
    print(f"seed {seed}: {grid}, {mesh}, {kind}, {count} micro-batches, bias {bias}")
    model = Mixture(kind, bias=bias)
    check(model, quantizing(grid, target_modules=["router"]), mesh, MESHES[mesh], count, f"seed {seed}")


def test_each_expert_has_scales_of_its_own():
    """A stack as one matrix of rows has the same scales; one expert's do not follow from another's weights."""
    model, adapt = Mixture("gpt_oss"), quantizing("learned by group", target_modules=())
    order.attach(model, adapt, "cpu")
    assert tuple(model.experts.gate_up_proj_fake_quantizer.scale.shape) == (4, 16, 4)  # (experts, 2 x 8, 16 / 4)
    assert tuple(model.experts.down_proj_fake_quantizer.scale.shape) == (4, 16, 2)
    captured = traced(model, (torch.randn(4, 5, 16, dtype=torch.float64),), adapt)
    rounded = [n for n in captured.graph.nodes if n.target is FAKE]
    assert [tuple(n.meta["val"].shape) for n in rounded] == [(4, 16, 4, 4), (4, 16, 2, 4)]


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(target_parameters=["gate_up"]), "no parameter of the model is called 'gate_up'"),
        (dict(target_parameters=["router.weight"]), "router.weight is no stack of matrices"),
        (dict(target_parameters=["down_proj"], group_size=3), "group_size=3 does not divide the 8 inputs of experts.d"),
        (dict(target_modules=["experts"]), "experts is a MixtralExperts(.|\n)*target_parameters"),
    ],
)
def test_what_is_no_stack_is_refused(options, words):
    with pytest.raises(AdaptError, match=words):
        order.attach(Mixture("mixtral"), order.checked(autopar.FakeQuant(**{"target_modules": (), **options})))


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixture, self.last = Mixture("mixtral"), nn.Linear(16, 1).double()

    def forward(self, x):
        return self.last(x).square().mean()


def test_a_stack_that_is_not_used_is_refused():
    with pytest.raises(AdaptError, match="gate_up_proj is not used in this call"):
        autopar.plan(Unused(), "dp=2", (torch.randn(4, 16).double(),), adapt=quantizing("channel", target_modules=()))
