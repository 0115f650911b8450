"""Models in FP8 train on several processes as on one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import autopar
from autopar.errors import AdaptError
from autopar.models import registry
from autopar.plans.plan import Plan
from tests.helpers import gloo

from . import tiny
from .parity import device_mesh, full, planned, train


def _model():
    return tiny.llama(hidden_size=256, intermediate_size=256, num_hidden_layers=1)


def _fit(rank, recipe, mesh, plan):
    """(losses, gradients of the first step, weights after the last one)."""
    model, batch = _model()
    model = autopar.compile(model.double(), device_mesh(mesh), batch, plan=plan, adapt=[autopar.FP8(recipe)])
    model(**batch).loss.backward()
    gradients = {name: full(p.grad).clone() for name, p in model.named_parameters()}
    model.zero_grad()
    losses = train(model, batch, 4, lr=3e-3)
    return losses, gradients, {name: full(t).detach().clone() for name, t in model.state_dict().items()}


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("recipe, mesh, strategy", [
    ("block", "dp=2,tp=2", "megatron"), ("tensor", "dp=2,tp=2", "megatron"), ("block", "dp=3", "fsdp"),
])  # fmt: skip
def test_processes_train(recipe, mesh, strategy):
    model, batch = _model()
    plan = planned(model.double(), mesh, batch, strategy=strategy, adapt=[autopar.FP8(recipe)])
    ranks = gloo.run(plan.mesh.devices, _fit, recipe, mesh, plan)
    one = gloo.run(1, _fit, recipe, "dp=1", None)[0]
    for losses, gradients, state in ranks:
        assert losses[-1] < losses[0] and losses == pytest.approx(one[0], rel=1e-4)
        assert all((gradients[n] - g).norm() <= 1e-6 * g.norm() for n, g in one[1].items())
        assert all(torch.equal(value, ranks[0][2][name]) for name, value in state.items())


def test_a_compiled_model_has_what_its_plan_chose(alone):
    def build():
        return registry.build("mlp:hidden=128,ffn=128,layers=1", batch=4, seq=4, device="cpu", seed=0)

    def compiled(plan: Plan | None):
        model, inputs = build()
        made = autopar.compile(
            model, device_mesh("dp=1"), inputs, plan=plan, adapt=[autopar.FP8("auto")], hardware="a100"
        )
        made(**inputs).loss.backward()
        return made, any("fp8" in name for name in made.plan.sharding.nodes)

    plans = {}
    for recipe in ("", "tensor"):
        model, inputs = build()
        adapt = [autopar.FP8(recipe)] if recipe else ()
        plans[recipe or "none"] = autopar.plan(model, "dp=1", inputs, adapt=adapt, hardware="cpu-gloo", baselines=False)
    for text, plan in plans.items():
        made, is_fp8 = compiled(replace(plan, fp8=text))
        assert is_fp8 == (text == "tensor") and made.plan.fp8 == text
    made, is_fp8 = compiled(None)
    assert not is_fp8 and made.plan.fp8 == "none"
    with pytest.raises(AdaptError, match="not made with FP8"):
        compiled(plans["none"])
