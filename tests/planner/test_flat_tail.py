"""Memory and seconds of micro-batches whose backwards wait for a tail: what each has saved is held at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar import compiler
from autopar.hardware.profile import load
from autopar.ir.mesh import Mesh
from autopar.planner.objective.evaluate import evaluate
from autopar.planner.objective.memory_timeline import SAVED, TRANSIENT, live_bytes
from autopar.planner.objective.tail_cost import NO_TAIL
from autopar.planner.spmd.batch import in_micro_batches
from autopar.planner.spmd.plan import search
from autopar.planner.spmd.plan_options import PlanOptions
from autopar.planner.spmd.planned import Planned
from tests.helpers import whole_batch


class Deep(nn.Module):
    """Blocks that save much, and a loss of all pairs."""

    def __init__(self, layers: int = 6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return (x @ x.t()).logsumexp(-1).mean()


def planned(captured, count: int, hardware=load("cpu-gloo"), **asked) -> Planned:
    options = PlanOptions(hardware, baselines=False, micro_batches=count, **asked)
    return in_micro_batches(captured, options, lambda one, o: search(one, Mesh.parse("dp=2"), o))


@pytest.fixture(scope="module")
def deep():
    torch.manual_seed(0)
    return compiler.trace(Deep(), (torch.randn(64, 8),))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("count", [5, 4, 2])
def test_what_all_micro_batches_save_is_held(deep, count):
    """Four of 5 have 13 samples and one has 12."""
    found = planned(deep, count, strategy="ddp", recompute="none")
    alone = replace(found.pricer, in_flight=1.0, tail=NO_TAIL)
    one = evaluate(found.problem, found.evaluation.choice, alone)
    held = found.micro.in_flight
    assert held == pytest.approx(64 / (-(-64 // count)))
    assert found.evaluation.saved_bytes == pytest.approx(held * one.saved_bytes)
    assert found.live_bytes.most[SAVED] == pytest.approx(held * one.saved_bytes)
    more = found.live_bytes.peak_bytes - live_bytes(found.problem, one, alone).peak_bytes
    tail = found.pricer.tail
    assert tail.bytes_ > 4 * 64**2 and more == pytest.approx((held - 1) * one.saved_bytes + tail.bytes_)
    assert found.live_bytes.kinds[TRANSIENT].min() >= tail.bytes_


def test_the_tail_takes_its_seconds_once(deep):
    found = planned(deep, 4)
    plan, seconds = found.plan, found.pricer.tail.seconds
    assert plan.step_seconds == pytest.approx(4 * found.chosen.seconds + seconds) and seconds > 0
    assert plan.bound == pytest.approx(4 * found.chosen.bound_seconds + seconds)
    assert plan.compute_seconds == pytest.approx(4 * found.evaluation.compute_seconds + seconds)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("count", [4, 2])
def test_a_limit_makes_blocks_compute_again(deep, count):
    """One of them at a time is alive again, of one micro-batch."""
    free = planned(deep, count, strategy="ddp")
    least = planned(deep, count, strategy="ddp", recompute="full").plan.peak_bytes
    assert not free.plan.recomputed and least < 0.8 * free.plan.peak_bytes
    for share in (0.1, 0.5, 0.9):
        limit = least + share * (free.plan.peak_bytes - least)
        plan = planned(deep, count, strategy="ddp", memory_bytes=limit).plan
        assert plan.peak_bytes <= limit and plan.recompute_seconds > 0


@pytest.mark.slow
def test_more_micro_batches_save_no_less():
    """But what passes by is less, and computed again all of them hold little."""
    torch.manual_seed(0)
    captured = compiler.trace(Deep(12), (torch.randn(64, 8),))
    few, many = (planned(captured, count, strategy="ddp", recompute="none") for count in (2, 8))
    assert many.evaluation.saved_bytes == pytest.approx(few.evaluation.saved_bytes, rel=0.01)
    few, many = (planned(captured, count, strategy="ddp", recompute="full").plan for count in (2, 8))
    assert many.peak_bytes < few.peak_bytes


def test_without_a_tail_one_is_in_flight():
    captured = compiler.trace(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), (torch.randn(8, 6),), lambda y: y.mean())
    found = planned(captured, 4)
    assert found.pricer.in_flight == 1 and found.pricer.tail is NO_TAIL and found.plan.pipeline.schedule == "1f1b"


@pytest.mark.slow
def test_recipes_beside_the_plan_have_it_too():
    captured = compiler.trace(whole_batch.Pairs("clip"), whole_batch.pairs(16))
    options = PlanOptions(load("cpu-gloo"), micro_batches=2)
    found = in_micro_batches(captured, options, lambda one, o: search(one, Mesh.parse("dp=2"), o))
    rows = {one.name: one for one in found.plan.alternatives}
    assert rows["ddp"].step_seconds >= 2 * found.others["ddp"].seconds + found.pricer.tail.seconds > 0


@pytest.mark.slow
@pytest.mark.parametrize("samples", [7, 6])
def test_a_deep_model_is_planned_by_few_blocks(samples):
    """Each block has a part in the tail, and costs what it does where all blocks are planned."""
    captured, profile = compiler.trace(whole_batch.Layered(12), (torch.randn(samples, 5, 6),)), load("cpu-gloo")
    alone = replace(profile, links=tuple(replace(link, bucket_bytes=1) for link in profile.links))
    few, every = (planned(one, 3, alone, strategy="fsdp") for one in (captured, replace(captured, compact=None)))
    assert few.problem.compact is not None and len(few.problem.vertices) < 0.9 * len(every.problem.vertices)
    assert few.evaluation.seconds == pytest.approx(every.evaluation.seconds)
    assert few.plan.step_seconds == pytest.approx(every.plan.step_seconds)
    assert few.plan.peak_bytes == pytest.approx(every.plan.peak_bytes, rel=1e-3)
