"""A number of devices: with stages or without, whichever is faster, and stages if a schedule is asked for."""

import math
from dataclasses import replace

import pytest

from autopar.cli.main import main
from autopar.errors import MemoryInfeasibleError, StageError
from autopar.hardware.profile import Tier
from autopar.planner.pipeline import mesh_search
from autopar.planner.pipeline.mesh_search import combinations
from autopar.planner.solver.minimize import BeyondCutoff, Search
from autopar.planner.spmd import mesh_search as meshes
from autopar.planner.spmd.plan_options import PlanOptions
from tests.planner.planning import captured, toy
from tests.planner.test_pipeline import GPT, check_step, trace_of

# nodes of two devices; what leaves them is slow, so that gradients of all parameters cost more than a stage's
# activations
NODES = replace(
    toy(flops=1e8, memory=1e10), links=(Tier("in", 2, 0.0, 1e9, 1 << 40), Tier("out", None, 0.0, 2e5, 1 << 40))
)


def found(devices: int = 4, hardware=NODES, graph=None, schedule: str = "auto", **options):
    graph = trace_of(GPT) if graph is None else graph
    return mesh_search.search(graph, devices, PlanOptions(hardware, baselines=False, **options), schedule=schedule)


def test_combinations_use_all_devices_and_cut_the_batch_evenly():
    every = combinations(64, 8, 48, 16)
    assert len(set(every)) == len(every)
    for one in every:
        sizes = dict(zip(one.mesh.names, one.mesh.sizes))
        assert math.prod(sizes.values()) == 64 and 2 <= one.stages <= 16 and sizes.get("tp", 1) in (1, 2, 4, 8)
        assert one.micro_batches * one.samples * sizes.get("dp", 1) == 48
        assert one.mesh.names[0] == "pp" and 1 not in one.mesh.sizes
    assert combinations(4, 8, 3, 1) == []


@pytest.mark.slow
def test_stages_win_where_gradients_are_dear():
    planned = found()
    assert planned.staged
    plan = planned.plan
    assert plan.mesh.devices == 4 and plan.mesh.size("pp") > 1
    told = {one.mesh: one for one in plan.meshes}
    assert str(plan.mesh) in told and any("pp" not in mesh for mesh in told)
    assert plan.step_seconds <= meshes.search(trace_of(GPT), 4, PlanOptions(NODES, baselines=False)).plan.step_seconds
    assert all(
        plan.step_seconds <= 1.1 * one.step_seconds for one in plan.meshes if one.step_seconds
    )  # others are estimates
    assert "meshes tried" in str(plan)
    check_step(GPT, plan)


@pytest.mark.slow
def test_no_stages_where_links_are_fast():
    planned = found(hardware=toy(flops=1e8, memory=1e10, link=1e12))
    assert not planned.staged
    assert not planned.staged and planned.plan.mesh.devices == 4


@pytest.mark.slow
def test_a_schedule_that_is_asked_for_makes_stages():
    planned = found(hardware=toy(flops=1e8, memory=1e10, link=1e12), schedule="1f1b")
    assert planned.plan.pipeline.schedule == "1f1b"
    assert all(one.mesh.startswith("pp=") for one in planned.plan.meshes)


@pytest.mark.parametrize("options", [{"strategy": "fsdp"}, {"micro_batches": 2}], ids=str)
@pytest.mark.slow
def test_what_has_no_stages_gets_none(options):
    assert not found(**options).staged
    with pytest.raises(StageError) as refused:
        found(schedule="1f1b", **options)
    assert refused.value.fix


def test_one_sample_gets_stages_where_nothing_else_fits(monkeypatch):
    """One stage computes at a time on one micro-batch: stages are tried last, and then as ever."""
    graph, tours, run = captured(GPT, batch=1, seq=16), [], mesh_search._MeshSearch.run
    monkeypatch.setattr(mesh_search._MeshSearch, "run", lambda tour: tours.append(tour) or run(tour))
    planned = found(graph=graph)
    assert not planned.staged and not tours

    def nothing(*_, **__):
        raise MemoryInfeasibleError("no mesh fits", missing_bytes=1)

    monkeypatch.setattr(meshes, "search", nothing)
    assert found(graph=graph).staged and len(tours) == 1


def test_what_fits_nowhere_is_refused():
    with pytest.raises(StageError, match="fit") as refused:
        found(memory_bytes=1e3, schedule="1f1b", graph=captured("mlp:hidden=32,layers=4"))
    assert "more devices" in refused.value.fix


@pytest.mark.slow
def test_a_search_gives_up_beyond_its_cutoff():
    graph = captured(GPT)
    best = meshes.search(graph, 4, PlanOptions(NODES, baselines=False)).plan.step_seconds
    beyond = PlanOptions(NODES, baselines=False, search=Search(cutoff_seconds=0.5 * best))
    with pytest.raises(BeyondCutoff) as gave_up:
        meshes.search(graph, 4, beyond)
    assert 0.5 * best <= gave_up.value.bound_seconds <= best * (1 + 1e-9) and gave_up.value.candidates


@pytest.mark.slow
def test_command_line(capsys):
    words = ["--model", "gpt2-tiny", "--devices", "4", "--batch", "8", "--seq", "16", "--hardware", "cpu-gloo"]
    assert main(["plan", *words, "--schedule", "1f1b", "--no-baselines"]) == 0
    out = capsys.readouterr().out
    assert "1f1b: " in out and "ranks along pp" in out and "meshes tried" in out
