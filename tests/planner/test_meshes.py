"""The search for a mesh: which are tried, which wins, and that it is the same one every time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.errors import InputError, MemoryInfeasibleError, StrategyError
from autopar.hardware.profile import Tier
from autopar.ir.mesh import Mesh
from autopar.planner.mesh_search import candidates, refines, search
from autopar.planner.plan import PlanOptions
from autopar.plans.plan import Plan

from .planning import captured, make, toy

MODEL = "mlp-tiny:layers=1"
# nodes of two devices, with a slow link between them
NODES = replace(toy(link=1e8), links=(Tier("inner", 2, 0.0, 1e9, 1 << 40), Tier("outer", None, 0.0, 1e8, 1 << 40)))


def found(devices: int, **options) -> Plan:
    return search(captured(MODEL), devices, PlanOptions(NODES, **{"baselines": False} | options)).plan


def test_candidates_keep_the_inner_axis_in_a_node():
    assert [str(m) for m in candidates(64, 8, 64)] == ["dp=64", "dp=32,tp=2", "dp=16,tp=4", "dp=8,tp=8"]
    assert [str(m) for m in candidates(8, 8, 64)] == ["dp=8", "dp=4,tp=2", "dp=2,tp=4"]
    assert [str(m) for m in candidates(16, 8, 64, axes=3)] == [
        "dp=4,cp=2,tp=2", "dp=2,cp=4,tp=2", "dp=2,cp=2,tp=4",
    ]  # fmt: skip


def test_the_outer_axis_divides_the_batch():
    assert [str(m) for m in candidates(64, 8, 16)] == ["dp=16,tp=4", "dp=8,tp=8"]
    assert [str(m) for m in candidates(64, 8, 1)][0] == "cp=64"  # one sample is cut along its sequence
    assert candidates(64, 8, 7) == candidates(64, 8, 7, axes=3) == []


def test_refinements():
    fine = Mesh.parse("dp=2,cp=4,tp=8")
    assert refines(fine, Mesh.parse("dp=8,tp=8")) and refines(fine, Mesh.parse("dp=2,tp=32"))
    assert not refines(fine, Mesh.parse("dp=16,tp=4"))


def test_the_best_mesh_is_the_best_of_those_that_were_tried():
    plan = found(4)
    assert [m.mesh for m in plan.meshes][0] == str(plan.mesh)
    assert {m.mesh for m in plan.meshes} == {"dp=4", "dp=2,tp=2"}
    for tried in plan.meshes:
        alone = make(MODEL, tried.mesh, NODES)
        assert tried.bound <= alone.step_seconds * (1 + 1e-9)
        assert plan.step_seconds <= alone.step_seconds * 1.001
    assert found(4).to_json() == plan.to_json()
    assert Plan.from_json(plan.to_json()) == plan
    assert "meshes tried" in str(plan)


def test_with_experts_micro_batches_and_a_strategy():
    plan = found(4, baselines=True, micro_batches=2)
    assert plan.micro_batches == 2 and len(plan.alternatives) == 9
    assert plan.meshes[0].step_seconds == pytest.approx(plan.step_seconds, rel=1e-3)
    assert [m.mesh for m in found(4, strategy="hsdp").meshes] == ["dp=2,tp=2"]  # the only one with two axes


def test_refusals():
    with pytest.raises(InputError, match="use a batch of 8 or 10"):
        search(captured(MODEL, 9), 4, PlanOptions(NODES))
    with pytest.raises(MemoryInfeasibleError):
        found(4, memory_bytes=1e4)
    with pytest.raises(StrategyError, match="two axes"):
        found(2, strategy="hsdp")
