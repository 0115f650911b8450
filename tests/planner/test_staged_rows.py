"""Experts' pipelines beside a plan without stages: each is the plan that its mesh, strategy and schedule give."""

from __future__ import annotations

import pytest

import autopar
from autopar.errors import StrategyError
from autopar.models.registry import build
from autopar.plans.plan import Plan

MODEL = "gpt:hidden=64,layers=4,heads=4,vocab=128,seq=32"
ASKED = {"hardware": "h100", "precision": "bf16"}


@pytest.mark.slow
def test_pipelines_beside_a_plan(tmp_path):
    model, inputs = build(MODEL, batch=16, seq=32)
    plan = autopar.plan(model, "dp=4,tp=2", inputs, baselines="pipelines", **ASKED)
    rows = [row for row in plan.alternatives if row.mesh]
    assert [(row.name, row.mesh, row.micro_batches) for row in rows] == [
        ("megatron_sp+zero1", "pp=2,dp=2,tp=2", 8), ("megatron_sp", "pp=4,tp=2", 16),
    ]  # fmt: skip
    for row in rows:
        again = autopar.plan(
            model, row.mesh, inputs, strategy=row.name, schedule=row.schedule, micro_batches=row.micro_batches, **ASKED
        )
        figures = again.step_seconds, again.communication_seconds, again.peak_bytes
        assert figures == (row.step_seconds, row.communication_seconds, row.peak_bytes), row
        line = next(line for line in str(plan).splitlines() if line.startswith(row.label))
        assert f"1f1b, {row.micro_batches} micro-batches" in line
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_none_where_no_number_of_ranks_divides_the_outermost_axis():
    model, inputs = build("gpt:hidden=32,layers=1,heads=2,vocab=64,seq=16", batch=3, seq=16)
    assert not any(row.mesh for row in autopar.plan(model, "dp=3", inputs, baselines="pipelines", **ASKED).alternatives)
    with pytest.raises(StrategyError, match="baselines='pipeline'"):
        autopar.plan(model, "dp=3", inputs, baselines="pipeline", **ASKED)
