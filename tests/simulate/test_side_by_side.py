"""Forwards beside the backwards of the micro-batches before: steps are exact, graphs hide the bytes that plans do."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from autopar.api import entry as api
from autopar.codegen.rank_program import GraphKey, pair_of
from autopar.planner.spmd.planned import Planned
from autopar.plans.plan import Plan
from autopar.simulate import census
from autopar.simulate.compare import verify_plan
from autopar.simulate.pipeline import Lowered
from benchmarks.overlap import LOW

from ..helpers.shared_experts import SharedExperts, gpus, inputs

EXACT = 1e-10
MESHES = {
    "ep=2": "expert", "ep=4": "expert", "dp=2,ep=2": "expert+zero1", "ep=2,dp=2": "expert", "dp=2,ep=4": "expert+fsdp",
    "ep=2,tp=2": "expert+megatron_sp", "ep=4,tp=2": "expert+megatron_sp+zero1",
}  # fmt: skip


def planned(model, given, mesh: str, strategy: str, micro_batches: int, **options) -> Planned:
    return api.search(
        model, mesh, given, strategy=strategy, micro_batches=micro_batches,
        **{"baselines": False, "precision": "fp32", "hardware": gpus()} | options,
    )  # fmt: skip


def one_after_the_other(plan: Plan) -> Plan:
    return replace(plan, pipeline=replace(plan.pipeline, pairs=None))


def check_census(found: Planned, lowered: Lowered) -> None:
    """Compare what a plan hides in a pair with what is hidden in its graph. What it computes again and nothing reads is
    not in the graph."""
    plan, program = census.pairs_of_plan(found), lowered.stages[0][0]
    graph = program.graph(pair_of(GraphKey("F"), GraphKey("B", adds=True))).graph
    made = census.of_graph(graph, census.exchanges_in_graph(graph))
    assert plan.overlapped > 0 and made.overlapped / made.moved >= LOW * plan.overlapped / plan.moved
    if not found.plan.recomputed and not found.micro.smaller:
        assert made.moved == pytest.approx(plan.moved, rel=1e-3)
        assert made.overlapped <= plan.overlapped * (2 - LOW)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(21))
def test_any_layers(seed):
    """Layers of any shapes, on any mesh, in any number of micro-batches, of which the last ones may be smaller."""
    print(f"seed {seed}")
    random = Random(seed)
    mesh = [*MESHES][seed % len(MESHES)]
    micro_batches = random.choice([2, 3, 4])
    model = SharedExperts(
        random.choice([1, 2, 3]), random.choice([7, 8, 11]), random.choice([1, 2]), random.random() < 0.5,
        random.random() < 0.5, seed,
    )  # fmt: skip
    uneven = 0 if "tp" in mesh else random.choice([0, 1])  # what tensor parallelism gathers would differ
    given = inputs(8 * micro_batches + uneven, random.choice([11, 16]))
    found = planned(model, given, mesh, MESHES[mesh], micro_batches, recompute=random.choice(["none", "full"]))
    plan = found.plan
    assert plan.pipeline.pairs and plan.pipeline.pairs.gained_seconds > 0
    check_census(found, Lowered.of(found.captured, plan))
    report, apart = (
        verify_plan(found.captured, one, model, given) for one in (plan, one_after_the_other(plan))
    )  # fmt: skip
    assert max(report.errors.values()) <= EXACT, (report.errors, report.diverging)
    assert report.sent_bytes == apart.sent_bytes and report.collectives == apart.collectives
