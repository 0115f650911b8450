"""state_dtype="bf16": what a plan predicts of an optimizer whose state is kept in a narrow type."""

from __future__ import annotations

import json

import pytest
import torch

import autopar
from autopar.cli.main import main
from autopar.models import registry
from tests.helpers import kept

MODEL = "gpt:hidden=32,layers=1,heads=4,vocab=64,seq=16"


def plan(mesh: str, dtype, **options) -> autopar.Plan:
    model, inputs = registry.build(MODEL, batch=8, seq=16, device="meta")
    return kept.plan(model, mesh, inputs, hardware="h100", baselines=False, state_dtype=dtype, **options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "mesh, options",
    [
        ("dp=4", dict(strategy="ddp")), ("dp=4", dict(strategy="fsdp")), ("dp=2,tp=2", dict(strategy="megatron")),
        ("dp=2", dict(strategy="zero1", micro_batches=2)), ("pp=2,dp=2", dict(strategy="ddp", micro_batches=2)),
        ("dp=2", dict(strategy="ddp", offload="optimizer")),
    ],
)  # fmt: skip
def test_state_takes_half_and_steps_take_longer(mesh, options, precision):
    """8 bytes an element become 4, 28 that are moved become 52; nothing else is another."""
    wide, narrow = (plan(mesh, dtype, precision=precision, **options) for dtype in (None, "bf16"))
    others = [{k: v for k, v in p.memory.items() if k != "optimizer"} for p in (wide, narrow)]
    assert others[0] == others[1]
    assert narrow.memory.get("optimizer", 0.0) == wide.memory.get("optimizer", 0.0) / 2
    assert narrow.update_seconds == pytest.approx(52 / 28 * wide.update_seconds)
    assert narrow.step_seconds > wide.step_seconds
    if "offload" in options:
        elements = wide.parameter_elements
        assert wide.offloaded.host_bytes - narrow.offloaded.host_bytes == 4 * elements
        assert narrow.offloaded.optimizer_seconds == pytest.approx(52 / 28 * wide.offloaded.optimizer_seconds)


def test_a_plan_that_fits_with_narrow_state_alone():
    need = [plan("dp=2", dtype, strategy="ddp").peak_bytes for dtype in (None, torch.bfloat16)]
    assert need[1] < need[0]
    between = sum(need) / 2
    assert plan("dp=2", "bfloat16", strategy="ddp", memory=between, recompute="none").state_dtype == "bf16"
    with pytest.raises(autopar.errors.MemoryInfeasibleError):
        plan("dp=2", None, strategy="ddp", memory=between, recompute="none", fixes=False)


def test_command_line(tmp_path, capsys):
    out = str(tmp_path / "plan.json")
    asked = ["--model", MODEL, "--mesh", "dp=2", "--batch", "8", "--seq", "16", "--no-baselines", "--json", out]
    assert main(["plan", *asked, "--state-dtype", "bf16"]) == 0
    assert "bf16, adamw with state in bf16, strategy auto" in capsys.readouterr().out
    assert json.loads(open(out).read())["state_dtype"] == "bf16"
    assert main(["plan", *asked, "--state-dtype", "fp16"]) == 2
    assert "cannot be kept in 'fp16'" in capsys.readouterr().err
