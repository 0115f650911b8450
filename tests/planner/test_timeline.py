"""A plan played through: what may run beside what, and the bounds that every timeline keeps."""

from __future__ import annotations

import functools
import itertools
import math
import random

import pytest

from autopar.ir.block_order import block_of
from autopar.ir.mesh import Mesh
from autopar.planner.objective.checkpoint_blocks import Blocks
from autopar.planner.objective.evaluate import Evaluation
from autopar.planner.objective.pricer import Pricer
from autopar.planner.objective.timeline import COMPUTE, Timeline, simulate
from autopar.planner.problem.multipliers import Prices
from autopar.planner.problem.problem import Problem
from autopar.planner.spmd.plan import search
from autopar.planner.spmd.plan_options import PlanOptions
from autopar.planner.spmd.planned import Planned
from tests.helpers.work import counted

from .planning import TINY_GPT, TINY_LLAMA, Instance, captured, toy

TWO_BLOCKS = TINY_GPT.replace("layers=1", "layers=2")
CASES = [
    (TINY_GPT, "dp=2,tp=2", {}), (TWO_BLOCKS, "a=2,b=2", {"strategy": "fsdp"}),
    (TINY_LLAMA, "tp=2", {"strategy": "megatron"}), (TWO_BLOCKS, "dp=2,tp=2", {"strategy": "megatron_sp"}),
    (TWO_BLOCKS, "dp=4", {"strategy": "ddp"}), (TINY_GPT, "dp=1", {}),
    ("mlp:hidden=64,layers=4", "dp=4", {"memory_bytes": 2.9e6, "batch": 512, "seq": 1}),
]  # fmt: skip


@functools.cache
def planned(model: str, mesh: str, strategy: str | None = None, batch: int = 8, seq: int = 16, **options) -> Planned:
    hardware = toy(flops=1e10, memory=1e11, latency=1e-6)
    options = PlanOptions(hardware, strategy=strategy, baselines=False, **options)
    return search(captured(model, batch, seq), Mesh.parse(mesh), options)


def check(problem: Problem, evaluation: Evaluation, pricer: Pricer, timeline: Timeline) -> None:
    """Check what holds of every timeline without a slowdown."""
    serial = sum(e.duration_seconds for e in timeline.events)
    assert serial == pytest.approx(evaluation.apart_seconds - evaluation.parameter_seconds)
    busiest = max(timeline.busy_seconds.values())
    assert busiest * (1 - 1e-9) <= timeline.seconds <= serial * (1 + 1e-9)
    assert timeline.seconds == pytest.approx(timeline.busy_seconds[COMPUTE] + timeline.exposed_seconds)
    for stream in (COMPUTE, *problem.mesh.names):
        own = [e for e in timeline.events if stream in e.streams]
        assert all(a.end_seconds <= b.start_seconds * (1 + 1e-9) + 1e-15 for a, b in itertools.pairwise(own))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model, mesh, options", CASES)
def test_between_the_busiest_stream_and_the_sum(model, mesh, options):
    found = planned(model, mesh, **options)
    beside = found.played(1.0)
    check(found.problem, found.evaluation, found.pricer, beside)
    assert beside == simulate(found.problem, found.evaluation, found.pricer, 1.0)
    slower = found.played(1.2)
    assert beside.seconds <= slower.seconds * (1 + 1e-9) <= 1.2 * beside.seconds * (1 + 1e-9)
    assert found.timeline == found.played(2.0) and found.timeline.seconds >= slower.seconds * (1 - 1e-9)
    assert found.plan.step_seconds == pytest.approx(found.timeline.seconds + found.plan.update_seconds)


@pytest.mark.parametrize("mesh", ["a=4", "a=2,b=2"])
def test_bounds_hold_for_any_choice(mesh):
    """Odd layouts on purpose: tensors that move in several steps, over several axes, with local copies between
    collectives."""
    instance, rng, steps = Instance(TINY_GPT, mesh, toy(latency=1e-6)), random.Random(0), 0
    prices = Prices(overlap=1.0, links=((0.0,), (0.0,)))
    tried = 0
    while tried < 12:
        free = {cls: [k for k, s in enumerate(c.strategies) if not any(x.partial for x in s.inputs)]
                for cls, c in instance.problem.classes.items()}  # fmt: skip
        e = instance.evaluate(
            {cls: rng.choice(options) for cls, options in free.items()}, prices, rng.choice([None, False, True])
        )
        if math.isfinite(e.seconds):
            tried += 1
            steps = max(steps, *(len(t.redistribution.steps) for t in e.transfers))
            timeline = simulate(instance.problem, e, instance.pricer)
            check(instance.problem, e, instance.pricer, timeline)
            assert simulate(instance.problem, e, instance.pricer, 1.3).seconds >= timeline.seconds * (1 - 1e-9)
    assert steps > 1


def test_readers_wait_for_what_they_read():
    found = planned(TWO_BLOCKS, "dp=2,tp=2", strategy="megatron")
    problem, choice = found.problem, found.evaluation.choice
    end = {}
    events = found.played(1.0).events
    for e in events:
        if e.step is not None:
            end[e.vertex, e.output, e.step.after, e.phase] = e.end_seconds
    waits = 0
    for e in (e for e in events if e.streams == (COMPUTE,) and e.step is None):
        strategy = problem.choices(e.vertex).strategies[choice[e.vertex]]
        for (p, o), layout in zip(problem.vertices[e.vertex].inputs, strategy.inputs):
            if (p, o, layout, e.phase) in end:
                waits += 1
                assert end[p, o, layout, e.phase] <= e.start_seconds + 1e-15
    assert waits > 4


def test_gradients_travel_behind_the_backward_and_parameters_one_block_ahead():
    found = planned(TWO_BLOCKS, "dp=4", strategy="fsdp")
    timeline = found.played(1.0)
    events = timeline.events
    compute = [e for e in events if e.streams == (COMPUTE,)]
    begins = {}
    for e in compute:
        begins.setdefault((e.phase, block_of(e.module)), e.start_seconds)
    gathers = [e for e in events if e.kind == "all_gather" and e.phase == "forward" and block_of(e.module) == "h.1"]
    assert gathers and all(e.start_seconds >= begins["forward", "h.0"] for e in gathers)
    assert min(e.start_seconds for e in gathers) < begins["forward", "h.1"]
    reductions = [e for e in events if e.kind == "reduce_scatter"]
    beside = [
        r
        for r in reductions
        if any(c.start_seconds < r.end_seconds and r.start_seconds < c.end_seconds for c in compute)
    ]
    assert len(beside) > len(reductions) / 2
    assert timeline.seconds < 0.95 * found.evaluation.apart_seconds


def test_recomputed_blocks_run_again():
    found = planned(TWO_BLOCKS, "dp=2,tp=2", strategy="megatron")
    blocks = Blocks(found.problem, found.pricer)
    e, _ = blocks.fit(found.evaluation, blocks.least_bytes(found.evaluation) + 1)
    assert e.recomputed.keys() == {"h.0", "h.1"} and e.recompute_seconds > 0
    timeline = simulate(found.problem, e, found.pricer, 1.0)
    check(found.problem, e, found.pricer, timeline)
    again = [x for x in timeline.events if x.recomputed]
    moved = sum(t.seconds * t.copies for t in e.recompute_transfers)
    assert moved > 0 and sum(x.duration_seconds for x in again) == pytest.approx(e.recompute_seconds + moved)
    assert {block_of(x.module) for x in again} == {"h.0", "h.1"} and {x.phase for x in again} == {"backward"}
    assert any(x.kind == "all_reduce" for x in again)


def test_no_slowdown_below_one():
    with pytest.raises(ValueError, match="1 or more"):
        planned(TINY_GPT, "dp=1").played(0.9)


def test_an_op_takes_some_seventy_calls():
    found = planned(TWO_BLOCKS, "dp=4", strategy="fsdp")
    _, calls = counted(simulate, found.problem, found.evaluation, found.pricer, 1.0)
    assert calls < 100 * len(found.problem.vertices)
