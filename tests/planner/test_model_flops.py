"""A plan says which share of the devices' peak the model's FLOPs make up, and whether others have reached that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar import models
from autopar.errors import StrategyError
from autopar.hardware import load
from autopar.plans.entries import Flops
from autopar.plans.plan import Plan
from autopar.utils.format import percent
from tests.helpers import kept

HIDDEN, LAYERS, VOCAB, SEQ, BATCH = 64, 3, 512, 32, 8
MODEL = f"gpt:hidden={HIDDEN},layers={LAYERS},heads=4,vocab={VOCAB},seq={SEQ}"
FLOPS = 72 * BATCH * SEQ * LAYERS * HIDDEN**2 * (1 + SEQ / (6 * HIDDEN) + VOCAB / (12 * LAYERS * HIDDEN))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh, options", [
    ("dp=4", {}), ("dp=2,tp=2", {"recompute": "full"}), ("dp=2", {"micro_batches": 2}),
    ("pp=2,dp=2", {"micro_batches": 3}),
])  # fmt: skip
def test_model_flops_are_those_of_the_paper(mesh, options):
    model, inputs = models.build(MODEL, batch=BATCH, seq=SEQ, device="meta")
    plan = kept.plan(model, mesh, inputs, hardware="h100", precision="auto", baselines=False, **options)
    assert plan.precision == plan.flops.dtype == "bf16" and plan.flops.model == pytest.approx(FLOPS)
    assert plan.flops.closed == pytest.approx(6 * BATCH * SEQ**2 * LAYERS * HIDDEN)  # half of all pairs
    peak = load("h100").flops_per_second["bf16"]
    assert plan.utilization == pytest.approx(FLOPS / (plan.mesh.devices * plan.step_seconds * peak))
    assert f"MFU {percent(plan.utilization, 1.0)}: " in str(plan) and "published" not in str(plan)
    assert Plan.from_json(plan.to_json()).utilization == plan.utilization


def test_a_plan_of_long_sequences_says_what_masks_close():
    model, inputs = models.build(MODEL.replace(f"seq={SEQ}", "seq=4096"), batch=1, seq=4096, device="meta")
    hardware = replace(load("h100"), published_utilization={"bf16": 1e-9})
    plan = kept.plan(model, "dp=2", inputs, hardware=hardware, precision="auto", baselines=False)
    computed = plan.utilization * (1 - plan.flops.closed / plan.flops.model)
    assert f"a device, {percent(computed, 1.0)} without what causal masks close, above the" in str(plan)


def test_a_plan_above_what_is_published_says_so():
    model, inputs = models.build(MODEL.replace("layers=3", "layers=1"), batch=BATCH, seq=SEQ, device="meta")
    hardware = replace(load("h100"), published_utilization={"bf16": 1e-9})
    plan = kept.plan(model, "dp=2", inputs, hardware=hardware, precision="auto", baselines=False)
    assert "above the <0.1% that is published of h100: expect less" in str(plan)
    assert "MFU" not in str(replace(plan, flops=Flops()))


def test_auto_is_the_models_own_types_where_nothing_is_faster():
    model, inputs = models.build(MODEL.replace("layers=3", "layers=1"), batch=BATCH, seq=SEQ, device="meta")
    plan = kept.plan(model, "dp=2", inputs, hardware="cpu-gloo", precision="auto", baselines=False)
    assert plan.precision == plan.flops.dtype == "fp32"
    with pytest.raises(StrategyError, match="no precision 'fast' is known"):
        kept.plan(model, "dp=2", inputs, precision="fast")
