"""The tail of a step has a price, and the planner takes a schedule that can run it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from autopar import compiler
from autopar.cost.compute import ComputeCost
from autopar.errors import MicroBatchError
from autopar.hardware.profile import load
from autopar.ir.mesh import Mesh
from autopar.passes.pipeline.micro_batch import micro_batch
from autopar.planner.explain_pipeline import explain_pipeline
from autopar.planner.objective.tail_cost import TailCost, tail_cost
from autopar.planner.pipeline.evaluate import evaluate_pipeline
from autopar.planner.pipeline.plan import kinds_of, plan_pipeline
from autopar.planner.pipeline.search import PipelineSearch
from autopar.planner.spmd.plan_options import PlanOptions
from tests.helpers import whole_batch


@cache
def captured_of(loss: str, samples: int):
    return compiler.trace(whole_batch.Pairs(loss), whole_batch.pairs(samples))


def _planned(loss: str, samples: int, **asked):
    captured = captured_of(loss, samples)
    options = PlanOptions(load("cpu-gloo"), baselines=False)
    return plan_pipeline(captured, Mesh.parse("pp=2,dp=2"), options, **asked)


@pytest.mark.parametrize("samples", [8, 64, 256])
def test_the_bytes_of_a_tail_of_pairs(samples):
    """It reads two embeddings of four numbers a sample, and holds three or four matrices of all pairs at once."""
    captured = captured_of("clip", samples)
    tail = micro_batch(captured, 2).tail
    cost = tail_cost(tail, ComputeCost(load("cpu-gloo")), Mesh.parse("dp=2"))
    matrix, read = 4 * samples**2, 3 * 4 * 4 * samples + 4
    assert read + 3 * matrix <= cost.bytes_ <= read + 5 * matrix + 200 * samples
    assert cost.seconds > 0


def test_the_seconds_of_a_tail_grow_with_its_pairs():
    def seconds(samples: int) -> float:
        captured = captured_of("siglip", samples)
        tail = micro_batch(captured, 2).tail
        return tail_cost(tail, ComputeCost(load("cpu-gloo")), Mesh.parse("dp=2")).seconds

    few, many, more = map(seconds, (8, 512, 1024))
    assert few < many and 2.5 < more / many < 4.5


def test_every_rank_waits_for_the_tail_and_the_last_one_holds_it():
    found = _planned("clip", 64, micro_batches=4)
    assert found.plan.pipeline.schedule == "gpipe" and found.plan.micro_batches == 4
    best = found.stages.best
    tail, (problem, e) = best.search.plans.tail_cost, best.inner.whole
    assert tail.bytes_ > 3 * 4 * 64**2
    pipeline = replace(found.plan.pipeline, costs=())
    with_tail, without = (
        evaluate_pipeline(problem, e, best.inner.pricer, pipeline, best.search.send, tail=cost)
        for cost in (tail, TailCost())
    )
    assert with_tail.step_seconds == pytest.approx(found.plan.step_seconds)
    assert with_tail.step_seconds - without.step_seconds == pytest.approx(tail.seconds)
    more = [sum(a.values()) - sum(b.values()) for a, b in zip(with_tail.memory, without.memory)]
    assert more == pytest.approx([0.0, tail.bytes_])


def test_the_planner_chooses_among_schedules_that_can():
    """Without a number of micro-batches too; with one of them, each schedule can."""
    captured = captured_of("siglip", 16)
    mesh, options, kinds = Mesh.parse("pp=2,dp=2"), PlanOptions(load("cpu-gloo")), kinds_of("auto", None)
    tried = {n: PipelineSearch(captured, n, mesh, options, "pairs", kinds, lambda text: None) for n in (1, 4)}
    assert tried[1].kinds == kinds and tried[4].kinds == [("gpipe", 1)]
    assert {one.schedule for one in tried[4].estimates()} == {"gpipe"}


def test_a_schedule_that_cannot_is_refused_or_runs_one_micro_batch():
    with pytest.raises(MicroBatchError) as caught:
        _planned("clip", 8, micro_batches=4, schedule="1f1b")
    assert "gpipe" in caught.value.fix and "1f1b" in caught.value.message
    found = _planned("clip", 8, schedule="1f1b")
    assert found.plan.micro_batches == 1 and "1f1b begins with backwards" in " ".join(found.plan.warnings)


def test_explain_says_which_schedules_cannot():
    priced = {one.text.split(",")[0]: one for one in explain_pipeline(_planned("clip", 8, micro_batches=4)).schedules}
    assert priced["gpipe"].chosen and "begins with backwards" in priced["zb_h1"].note
