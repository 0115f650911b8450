"""Recomputed blocks: less is saved, the gradients are those of one device."""

from __future__ import annotations

import pytest
import torch

from autopar.compiler import lower
from autopar.models import build
from autopar.simulate import step
from autopar.simulate.compare import verify_plan
from autopar.simulate.oracle import global_values
from tests.helpers import kept


def saved_bytes(parts) -> int:
    """Bytes that the forward hands to the backward, parameters and inputs left out."""
    output = next(iter(reversed(parts.forward.graph.nodes)))
    saved = [n for n, role in zip(output.args[0], output.meta["roles"]) if role is None and n.op == "call_function"]
    return sum(n.meta["val"].numel() * n.meta["val"].element_size() for n in saved)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("model", "mesh", "strategy"), [
    ("gpt2-tiny", "tp=2", "megatron_sp"), ("llama-tiny:layers=2", "dp=2", "fsdp"),
])  # fmt: skip
def test_gradients_are_equal_and_less_is_saved(model, mesh, strategy):
    module, inputs = build(model, batch=4, seq=16, device="cpu")
    options = {"hardware": "cpu-gloo", "strategy": strategy, "baselines": False, "cache": kept.captures()}
    plan, captured = step.plan_and_capture(module, mesh, inputs, **options)
    again, captured = step.plan_and_capture(module, mesh, inputs, **options, recompute="full")
    assert not plan.sharding.recomputed and len(again.recomputed) >= 2 and again.layouts == plan.layouts
    before, after = (lower(captured, p, 0, check=True).parts for p in (plan, again))
    assert saved_bytes(after) < 0.6 * saved_bytes(before)
    values = global_values(captured, module, inputs)
    want, got = (step.simulate_step(captured, p, values).gradients for p in (plan, again))
    module(**inputs).loss.backward()
    for name, parameter in module.named_parameters():
        assert torch.allclose(got[name], want[name], rtol=1e-5, atol=1e-7), name
        error = (got[name] - parameter.grad).norm() / parameter.grad.norm().clamp_min(1e-6)
        assert error < 1e-5, f"{name}: {error}"


@pytest.mark.slow
def test_a_small_limit_makes_the_planner_recompute():
    module, inputs = build("gpt:hidden=64,layers=4,heads=4,vocab=256,seq=64", batch=32, seq=64, device="cpu")
    free, captured = step.plan_and_capture(module, "dp=2", inputs, hardware="cpu-gloo", strategy="ddp", baselines=False)
    assert not free.recomputed
    limit = 0.5 * free.peak_bytes
    plan, captured = step.plan_and_capture(
        module, "dp=2", inputs, hardware="cpu-gloo", strategy="ddp", memory=limit, baselines=False, tile="none"
    )
    assert plan.recomputed and plan.peak_bytes <= limit
    assert plan.step_seconds > free.step_seconds and plan.recompute_seconds > 0
    report = verify_plan(captured, plan, module, inputs)
    assert report.loss_error < 1e-5 and max(report.gradient_errors.values()) < 1e-5


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("model", "mesh", "strategy"), [
    ("gpt2-tiny", "tp=2", "megatron_sp"), ("llama-tiny:layers=2", "dp=2,tp=2", None),
])  # fmt: skip
def test_levels_save_what_is_predicted_and_give_the_same_gradients(model, mesh, strategy):
    """None, selective and full, each less than the one before; the forward hands on no more than the plan says."""
    module, inputs = build(model, batch=4, seq=16, device="cpu")
    saved = {}
    for level in ("none", "selective", "full"):
        plan, captured = step.plan_and_capture(
            module, mesh, inputs, hardware="cpu-gloo", strategy=strategy, baselines=False, recompute=level
        )
        parts = lower(captured, plan, 0, check=True).parts
        saved[level] = saved_bytes(parts)
        assert saved[level] <= plan.memory["activations"] + plan.memory.get("gathered parameters kept", 0.0) + 256
        assert bool(plan.recomputed) == (level == "full")
        report = verify_plan(captured, plan, module, inputs)
        assert report.loss_error < 1e-5 and max(report.gradient_errors.values()) < 1e-5, level
    assert saved["full"] < saved["selective"] < saved["none"]
