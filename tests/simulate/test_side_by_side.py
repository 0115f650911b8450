"""Forwards beside the backwards of the micro-batches before: steps are exact, graphs hide the bytes that plans do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
import torch
from torch import nn

from autopar import compile as compile_
from autopar.api import entry as api
from autopar.codegen.rank_program import GraphKey, pair_of
from autopar.planner.objective.memory_timeline import live_bytes
from autopar.planner.objective.player import played_seconds
from autopar.planner.objective.side_by_side import in_turns, one_by_one
from autopar.planner.spmd.planned import Planned
from autopar.plans.plan import Plan
from autopar.simulate import census
from autopar.simulate.compare import verify_plan
from autopar.simulate.oracle import global_values, relative_error
from autopar.simulate.pipeline import Lowered, simulate_lowered
from benchmarks.overlap import LOW

from ..helpers import gloo
from ..helpers.allocations import training_step
from ..helpers.same_gradients import assert_same_gradients
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


@pytest.mark.slow
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
    if plan.pipeline.pairs is None:
        e = found.evaluation
        turns = in_turns(found.problem, e, found.pricer, gpus())
        assert played_seconds(found.problem, turns, found.pricer) >= played_seconds(found.problem, e, found.pricer)
        return
    assert plan.pipeline.pairs.gained_seconds > 0
    check_census(found, Lowered.of(found.captured, plan))
    report, apart = (
        verify_plan(found.captured, one, model, given) for one in (plan, one_after_the_other(plan))
    )  # fmt: skip
    assert max(report.errors.values()) <= EXACT, (report.errors, report.diverging)
    assert report.sent_bytes == apart.sent_bytes and report.collectives == apart.collectives


class Noisy(nn.Module):
    """Layers of experts with dropout between them, and a count of the calls."""

    def __init__(self):
        super().__init__()
        self.inner = SharedExperts(2)
        self.noise = nn.Dropout(0.4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        self.calls += 1
        x = self.inner.inward(x)
        for layer in self.inner.layers:
            x = layer(self.noise(x))
        return self.inner.outward(x).square().mean()


@pytest.mark.parametrize("mesh", ["ep=2", "dp=2,ep=2"])
def test_pairs_compute_the_same_numbers(mesh):
    """To the last bit, with dropout and a buffer: gradients are added up in the same order."""
    model, given = Noisy(), inputs(32)
    found = planned(model, given, mesh, "expert", 4)
    assert found.plan.pipeline.pairs
    lowered, values = Lowered.of(found.captured, found.plan), global_values(found.captured, model, given)
    pairs, apart = (
        simulate_lowered(lowered, plan, values) for plan in (found.plan, one_after_the_other(found.plan))
    )  # fmt: skip
    assert torch.equal(pairs.outputs["0"], apart.outputs["0"])
    assert torch.equal(pairs.buffers["calls"], apart.buffers["calls"])
    assert pairs.gradients.keys() == apart.gradients.keys()
    for name, wanted in apart.gradients.items():  # products of CPUs depend on where tensors lie
        assert relative_error(pairs.gradients[name], wanted) <= 1e-15


@pytest.mark.slow
@pytest.mark.gloo
def test_on_real_processes():
    gloo.run(2, _on_processes, seconds=300)


def _on_processes(rank: int) -> None:
    """Steps of several batches, whose rows go to experts in other numbers each time, and whose last micro-batches are
    smaller in one of them."""
    model, reference = SharedExperts(), SharedExperts()
    batches = [inputs(16), inputs(16), inputs(14)]
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    parallel = compile_(
        model,
        mesh,
        example_inputs=batches[0],
        strategy="expert",
        hardware=gpus(),
        micro_batches=4,
        precision="fp32",
        execution="eager",
    )
    assert parallel.plan.pipeline.pairs
    assert_same_gradients(parallel, reference, batches, EXACT)


class Loss(NamedTuple):
    loss: torch.Tensor


class WithLoss(SharedExperts):
    def forward(self, x):
        return Loss(super().forward(x))


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_memory_is_as_planned(recompute, tmp_path):
    """The second micro-batch is in the plan, and an allocation tracker finds no more."""
    model, (x,) = WithLoss(3, 8), inputs(32, 16)
    found = planned(model, {"x": x}, "ep=2", "expert", 4, recompute=recompute, execution="eager")
    assert found.plan.pipeline.pairs
    found.plan.save(tmp_path / "pairs.json")
    one_after_the_other(found.plan).save(tmp_path / "apart.json")
    pairs, apart = map(max, zip(*gloo.run(2, _tracked, str(tmp_path), seconds=300)))
    problem, e = found.whole
    alone = live_bytes(problem, one_by_one(e), found.pricer).peak_bytes
    print(pairs, found.plan.peak_bytes, found.plan.at_peak, apart, alone)
    assert apart <= 1.05 * alone and pairs <= 1.05 * found.plan.peak_bytes
    assert pairs >= 0.7 * found.plan.peak_bytes


def _tracked(rank: int, folder: str) -> list[int]:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    found = []
    for name in ("pairs", "apart"):
        torch.manual_seed(0)
        given = {"x": inputs(32, 16)[0]}
        parallel = compile_(
            WithLoss(3, 8), mesh, example_inputs=given, plan=Plan.load(Path(folder) / f"{name}.json"), hardware=gpus()
        )
        optimizer = torch.optim.AdamW(parallel.parameters())
        found.append(training_step(parallel, given, optimizer).peak_bytes)
    return found
