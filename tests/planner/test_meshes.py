"""The search for a mesh: which are tried, which wins, and that it is the same one every time."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from autopar.errors import InputError, MemoryInfeasibleError, StrategyError
from autopar.hardware.profile import Tier
from autopar.ir.mesh import Mesh
from autopar.planner.problem.recipes import Restriction
from autopar.planner.spmd.mesh_search import _quick_bounds, candidates, refines, search
from autopar.planner.spmd.plan import solvers_of
from autopar.planner.spmd.plan_options import PlanOptions
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


GPT = "gpt:hidden=64,layers=2,heads=4,vocab=128,seq=16"


@functools.cache
def limit() -> float:
    """Return a limit of memory under which plans of four devices compute again."""
    plan = make(GPT, "dp=4", NODES, batch=64)
    return plan.peak_bytes - 0.1 * plan.memory["activations"]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", ["dp=4", "dp=2,tp=2"])
def test_bounds_are_of_plans_that_fit(mesh):
    """They rise as memory falls, up to what the plans take that are found."""
    bounds = {}
    for memory in (1e12, limit()):
        options = PlanOptions(NODES, memory_bytes=memory, baselines=False)
        solver = solvers_of(captured(GPT, 64), Mesh.parse(mesh), options)[0]
        bounds[memory], roomy = _quick_bounds(solver, Restriction.of(None, Mesh.parse(mesh)), {})
        plan = make(GPT, mesh, NODES, batch=64, memory_bytes=memory)
        assert 0 < roomy <= bounds[memory] <= plan.step_seconds
    assert bounds[limit()] >= bounds[1e12] * (1 - 1e-9)


@pytest.mark.slow
def test_several_micro_batches_are_tried_where_memory_binds():
    options = PlanOptions(NODES, baselines=False, memory_bytes=limit())
    one = search(captured(GPT, 64), 4, options).plan
    free = search(captured(GPT, 64), 4, options, is_free=True).plan
    assert one.recomputed or one.recomputed_selectively
    assert free.step_seconds <= one.step_seconds * (1 + 1e-9) and free.peak_bytes <= limit()
    cut = [tried for tried in free.meshes if "micro-batches" in tried.note]
    assert cut and not any("micro-batches" in tried.note for tried in one.meshes)
    for tried in cut:
        assert tried.step_seconds is None or tried.bound <= tried.step_seconds * (1 + 1e-9)
        assert tried.step_seconds is None or free.step_seconds <= tried.step_seconds * (1 + 1e-9)


@pytest.mark.slow
def test_plain_meshes_are_searched_whatever_other_bounds_are():
    for tried in found(8, memory_bytes=None).meshes:
        if tried.mesh in ("dp=8", "dp=4,tp=2"):
            assert tried.step_seconds is not None or "above the best plan" in tried.note
