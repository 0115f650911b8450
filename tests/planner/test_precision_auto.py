"""precision="auto", the default: what the hardware computes fastest in, where that is free to choose."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import autopar
from autopar.planner.options import precision_on
from tests.runtime import tiny

CALL = dict(zip(("x", "target"), tiny.Regressor.batch()))


def test_plans_are_in_the_types_that_the_hardware_is_fast_in():
    model = tiny.Regressor(loss=True)
    for hardware, precision in (("h100", "bf16"), (None, "bf16"), ("v100", "fp32"), ("cpu-gloo", "fp32")):
        plan = autopar.plan(model, "dp=2", CALL, baselines=False, strategy="ddp", hardware=hardware)
        assert plan.precision == precision and plan.to_json()["precision"] == precision
        assert f", {precision}, adamw" in str(plan)
    assert autopar.estimate(model, "dp=2", CALL, strategy="ddp").plan.precision == "bf16"
    plan = autopar.plan(model, "dp=2", CALL, baselines=False, strategy="ddp", precision="fp32")
    assert plan.precision == "fp32"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_in_another_type_stays_in_it(dtype):
    model = tiny.Regressor(loss=True).to(dtype)
    assert precision_on("dp=2", "h100", "auto", model) == "fp32"  # which is the model's own types


def test_devices_that_are_cpus_compute_in_the_models_types():
    """Whatever profile is planned with, so that gradients are those of fp32."""
    mesh = SimpleNamespace(device_type="cpu")
    assert precision_on(mesh, "h100", "auto", tiny.Regressor()) == "fp32"
    assert precision_on(mesh, "h100", "bf16", tiny.Regressor()) == "bf16"
