"""Forwards beside backwards in the stages of a pipeline: steps are exact, and as many rows travel."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from autopar import compile as compile_
from autopar.api import entry as api
from autopar.codegen.rank_program import SAME_STAGE, pairs_of
from autopar.planner.objective.side_by_side import in_turns
from autopar.planner.spmd.planned import Planned
from autopar.plans.pipeline import Pairs
from autopar.plans.plan import Plan
from autopar.simulate import census
from autopar.simulate.compare import verify_plan
from autopar.simulate.pipeline import Lowered

from ..families import FAMILIES
from ..helpers import gloo
from ..helpers.allocations import training_step
from ..helpers.same_gradients import assert_same_gradients
from ..helpers.shared_experts import SharedExperts, gpus, inputs
from .test_side_by_side import WithLoss

EXACT = 1e-10
MESHES = {
    "pp=2,ep=2": "expert", "pp=2,ep=4": "expert", "pp=3,ep=2": "expert", "pp=2,dp=2,ep=2": "expert+zero1",
    "pp=2,ep=2,tp=2": "expert+megatron_sp", "pp=4,ep=2": "expert",
}  # fmt: skip


def planned(mesh: str, strategy: str, stages_per_rank: int, micro_batches: int, model, given, **options) -> Planned:
    schedule = "1f1b" if stages_per_rank == 1 else "interleaved_1f1b"
    return api.search(
        model, mesh, given, strategy=strategy, micro_batches=micro_batches, schedule=schedule,
        stages_per_rank=stages_per_rank, **{"baselines": False, "precision": "fp32", "hardware": gpus()} | options,
    )  # fmt: skip


def apart(plan: Plan) -> Plan:
    return replace(plan, pipeline=replace(plan.pipeline, pairs=None))


def in_pairs(found: Planned) -> Plan:
    """Return the plan in pairs, also where that gains nothing."""
    if found.plan.pipeline.pairs is not None:
        return found.plan
    problem, e = found.whole
    turning = in_turns(problem, e, found.pricer, gpus())
    turns = tuple(problem.vertices[v].node.name for v in sorted(turning.turns))
    return replace(found.plan, pipeline=replace(found.plan.pipeline, pairs=Pairs(turns, 0.0, 0.0)))


def check_same(found: Planned, model, given) -> None:
    """Compare a step in pairs with the eager model, and what it sends with the step one micro-batch at a time."""
    plan = in_pairs(found)
    pairs, single = (verify_plan(found.captured, one, model, given) for one in (plan, apart(plan)))
    assert max(pairs.errors.values()) <= EXACT, (pairs.errors, pairs.diverging)
    assert pairs.sent_bytes == single.sent_bytes and pairs.collectives == single.collectives
    assert pairs.sends == single.sends


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(24))
def test_any_layers(seed):
    """Layers of any shapes, in stages on any mesh, in any number of micro-batches, of which the last ones may be
    smaller."""
    print(f"seed {seed}")
    random = Random(seed)
    mesh = [*MESHES][seed % len(MESHES)]
    ranks, stages_per_rank, micro_batches = int(mesh[3]), random.choice([1, 2]), random.choice([2, 3, 5, 8])
    model = SharedExperts(
        2 * ranks * stages_per_rank, random.choice([7, 8, 11]), random.choice([1, 2]), random.random() < 0.5,
        random.random() < 0.5, seed,
    )  # fmt: skip
    uneven = 0 if "tp" in mesh else random.choice([0, 1])
    given = inputs(8 * micro_batches + uneven, random.choice([11, 16]))
    recompute = random.choice(["none", "full"])
    check_same(
        planned(mesh, MESHES[mesh], stages_per_rank, micro_batches, model, given, recompute=recompute), model, given
    )


@pytest.mark.parametrize("stages_per_rank", [1, 2])
def test_the_plan_is_of_the_played_clock(stages_per_rank):
    """A plan with slow links says of pairs what its schedule takes less, and rows travel in the graphs."""
    model, given = SharedExperts(4 * stages_per_rank), inputs(16 * 8)
    slow = gpus(link=3e7)
    found = planned("pp=2,ep=2", "expert", stages_per_rank, 8, model, given, hardware=slow)
    pipeline = found.plan.pipeline
    assert pipeline.pairs is not None and pipeline.pairs.gained_seconds > 0
    without = replace(pipeline, pairs=replace(pipeline.pairs, gained_by_stage=()))
    gained = without.played().busy, pipeline.played().busy
    mean = (sum(gained[0]) - sum(gained[1])) / pipeline.ranks
    assert pipeline.pairs.gained_seconds == pytest.approx(mean)
    assert Plan.from_json(found.plan.to_json()) == replace(found.plan, planning_seconds=0.0)
    assert "a forward runs beside the backward before it" in str(found.plan)
    check_same(found, model, given)
    lowered, orders = Lowered.of(found.captured, found.plan), pipeline.orders
    for rank in range(pipeline.ranks):
        programs = {stage: lowered.stages[stage][0] for stage in orders.stages_of(rank)}
        pairs = pairs_of(programs, orders.together(rank), lowered.micro.is_smaller)
        keys = [(stage, key) for stage, of_stage in pairs.items() for key in of_stage]
        assert keys and any(key.stage_before != SAME_STAGE for _, key in keys) == (stages_per_rank > 1)
        for stage, key in keys:
            graph = programs[stage].graph(key, programs).graph
            made = census.of_graph(graph, census.exchanges_in_graph(graph))
            assert made.overlapped > 0.5 * made.moved > 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stages_per_rank", [1, 2])
@pytest.mark.parametrize("share", [0.95, 0.8, 0.65])
def test_little_memory(share, stages_per_rank):
    """Pairs hold more than micro-batches one at a time: stages compute more again, and keep products beside rows."""
    model, given = SharedExperts(4 * stages_per_rank), inputs(16 * 8)
    slow = gpus(link=3e7)
    of_all = planned("pp=2,ep=2", "expert", stages_per_rank, 8, model, given, hardware=slow).plan
    limit = int(share * of_all.peak_bytes)
    found = planned("pp=2,ep=2", "expert", stages_per_rank, 8, model, given, hardware=slow, memory=limit)
    plan, (_, e) = found.plan, found.whole
    assert plan.pipeline.pairs is not None and e.beside and e.recompute_seconds > 0
    assert plan.peak_bytes <= limit and plan.step_seconds >= of_all.step_seconds
    check_same(found, model, given)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("stages_per_rank", [1, 2])
def test_on_real_processes(stages_per_rank, tmp_path):
    """Batches whose rows go to experts in other numbers each time, and one whose last micro-batches are smaller."""
    found = planned(
        "pp=2,ep=2",
        "expert",
        stages_per_rank,
        4,
        SharedExperts(4 * stages_per_rank, first=True),
        inputs(32),
        execution="eager",
    )
    in_pairs(found).save(tmp_path / "plan.json")
    gloo.run(4, _on_processes, str(tmp_path / "plan.json"), 4 * stages_per_rank, seconds=300)


def _on_processes(rank: int, file: str, layers: int) -> None:
    model, reference = SharedExperts(layers, first=True), SharedExperts(layers, first=True)
    batches = [inputs(32), inputs(32), inputs(30)]
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    parallel = compile_(model, mesh, example_inputs=batches[0], plan=Plan.load(Path(file)), hardware=gpus())
    assert parallel.plan.pipeline.pairs is not None
    assert_same_gradients(parallel, reference, batches, EXACT)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("stages_per_rank", [1, 2])
def test_memory_is_as_planned(stages_per_rank, tmp_path):
    """An allocation tracker finds no more than the plan says of the fullest rank, with two micro-batches at work."""
    model, (x,) = WithLoss(4 * stages_per_rank, 8, first=True), inputs(64, 16)
    found = planned(
        "pp=2,ep=2", "expert", stages_per_rank, 8, model, {"x": x}, execution="eager", hardware=gpus(link=3e7)
    )
    plan = found.plan
    assert plan.pipeline.pairs is not None
    plan.save(tmp_path / "plan.json")
    peak = max(gloo.run(4, _tracked, str(tmp_path / "plan.json"), 4 * stages_per_rank, seconds=300))
    print(peak, plan.peak_bytes, plan.at_peak)
    assert 0.7 * plan.peak_bytes <= peak <= 1.05 * plan.peak_bytes


def _tracked(rank: int, file: str, layers: int) -> int:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    given = {"x": inputs(64, 16)[0]}
    parallel = compile_(
        WithLoss(layers, 8, first=True), mesh, example_inputs=given, plan=Plan.load(Path(file)), hardware=gpus()
    )
    return training_step(parallel, given, torch.optim.AdamW(parallel.parameters())).peak_bytes


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen2_moe", "mixtral"])
def test_families(name):
    """They compute norms and routers in fp32; bytes and collectives are those without pairs."""
    torch.manual_seed(0)
    model, given = FAMILIES[name](24, 6)
    found = planned("pp=2,ep=2", "expert", 1, 6, model, given)
    plan = in_pairs(found)
    pairs, single = (verify_plan(found.captured, one, model, given) for one in (plan, apart(plan)))
    assert plan.pipeline.pairs.turns and max(pairs.errors.values()) <= 1e-5, (pairs.errors, pairs.diverging)
    assert pairs.sent_bytes == single.sent_bytes and pairs.collectives == single.collectives
