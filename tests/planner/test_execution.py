"""Plans for graphs that run op by op, and for compiled ones."""

from __future__ import annotations

import functools
import json

import pytest

import autopar
from autopar import models
from autopar.errors import PlanFormatError, StrategyError
from tests.helpers import kept

MODEL = "llama:hidden=1024,layers=1,heads=8,kv_heads=8,ffn=2048,vocab=512"


@functools.cache
def planned(execution: str) -> autopar.Plan:
    model, inputs = models.build(MODEL, batch=8, seq=1024)
    return kept.plan(model, "dp=2,tp=2", inputs, execution=execution, baselines=False, strategy="megatron")


def test_compiled_graphs_fuse_and_hide_launches():
    """A compiled plan of a recipe has less of launches and of what pointwise ops write for each other alone."""
    eager, compiled = (planned(execution) for execution in ("eager", "compiled"))
    assert compiled.compute_seconds < 0.9 * eager.compute_seconds
    assert compiled.communication_seconds == pytest.approx(eager.communication_seconds, rel=0.01)
    assert compiled.flops == eager.flops and compiled.utilization > eager.utilization
    assert "run op by op" in str(eager) and "run compiled, launches hidden" in str(compiled)


def test_plan_files_say_how_graphs_run(tmp_path):
    plan = planned("compiled")
    plan.save(tmp_path / "plan.json")
    assert autopar.Plan.load(tmp_path / "plan.json") == plan and plan.to_json()["execution"] == "compiled"
    data = plan.to_json() | {"execution": "slowly"}
    with pytest.raises(PlanFormatError, match="execution is not a way in which graphs run"):
        autopar.Plan.from_json(json.loads(json.dumps(data)))


def test_an_unknown_execution():
    with pytest.raises(StrategyError, match="no execution 'graphs'(.|\n)*eager or compiled"):
        planned("graphs")
