"""Steps of several passes: what they cost, whether gradients wait, and what a plan says of it."""

from __future__ import annotations

import pytest

from autopar import Plan
from autopar.errors import MemoryInfeasibleError, StrategyError
from autopar.passes.distribute.defer import unreduced_layouts

from .planning import captured, counts, make, toy

MODEL, MESH, LINK = "gpt2-tiny", "dp=4", 1e8


def planned(strategy: str | None, passes: int, **options) -> Plan:
    return make(MODEL, MESH, toy(link=LINK), strategy=strategy, micro_batches=passes, **options)


def test_every_pass_costs_the_same_where_gradients_do_not_wait():
    """All but the gathers of parameters, what they give is kept for the other passes, and the optimizer's update."""
    one, four = planned("zero2", 1), planned("zero2", 4)
    gathers = sum(c.seconds for c in one.collectives if c.kind == "all_gather")
    assert four.step_seconds == pytest.approx(4 * one.step_seconds - 3 * (gathers + one.update_seconds))
    assert not four.reduces_once
    assert four.step_seconds <= 4 * one.step_seconds
    assert four.peak_bytes >= one.peak_bytes
    gathered = counts(one)["all_gather"]
    assert counts(four) == {kind: 4 * n for kind, n in counts(one).items()} | {"all_gather": gathered}


@pytest.mark.parametrize("strategy, kind", [("ddp", "all_reduce"), ("zero1", "reduce_scatter")])
def test_gradients_that_wait_are_reduced_once(strategy, kind):
    one, four = planned(strategy, 1), planned(strategy, 4)
    assert four.reduces_once
    waiting = len(unreduced_layouts(captured(MODEL).graph, four.sharding))  # as the runtime's no_sync finds them
    here = counts(one, "backward")[kind]
    assert counts(four, "backward")[kind] == 4 * (here - waiting) + waiting
    saved = 4 * one.step_seconds - four.step_seconds - 3 * one.update_seconds
    reductions = sum(c.seconds for c in one.collectives if (c.phase, c.kind) == ("backward", kind))
    gathers = sum(c.seconds for c in one.collectives if c.kind == "all_gather")  # once a step too
    assert saved == pytest.approx(3 * (reductions * waiting / here + gathers), rel=0.05)  # the few others are small
    assert four.peak_bytes >= one.peak_bytes  # gradients of earlier passes are there in the forward
    assert four.bound <= four.step_seconds


def test_unreduced_gradients_take_their_place():
    every, once = planned("zero2", 4), planned("fsdp", 4)
    assert once.reduces_once and not every.reduces_once
    assert once.memory["gradients"] == pytest.approx(4 * planned("fsdp", 1).memory["gradients"], rel=0.01)


def test_a_search_takes_the_faster_way_that_fits():
    def searched(**options) -> Plan:
        return make("mlp-tiny:layers=1", MESH, toy(link=LINK, bucket=1 << 12), micro_batches=8, batch=64, **options)

    roomy = searched()  # buckets are small: gradients that wait for theirs are whole
    assert roomy.reduces_once
    states = sum(roomy.memory[kind] for kind in ("parameters", "gradients", "optimizer"))
    outputs = searched(memory_bytes=roomy.peak_bytes - 1).unmade_bytes  # first of all these are let go of
    # whole gradients leave 9/16 of these to be sharded, reduced ones 3/4
    limit = roomy.peak_bytes - outputs - 0.6 * states
    tight = searched(memory_bytes=limit)
    assert not tight.reduces_once and tight.peak_bytes <= limit
    assert tight.step_seconds > roomy.step_seconds


def test_a_plan_says_it_and_remembers_it():
    plan = planned("ddp", 3)
    assert "3 micro-batches of 8 samples, gradients reduced once a step" in str(plan) and plan.samples == 24
    assert Plan.from_json(plan.to_json()) == plan
    assert "micro-batches" not in str(planned("ddp", 1))


def test_experts_reduce_as_experts_do():
    plan = planned("fsdp", 4, baselines=True)
    seconds = {a.name: a.step_seconds for a in plan.alternatives}
    assert seconds["ddp"] == pytest.approx(planned("ddp", 4).step_seconds, rel=0.01)
    assert seconds["zero2"] == pytest.approx(planned("zero2", 4).step_seconds, rel=0.01)
    assert seconds["fsdp"] >= plan.step_seconds  # in every pass by default, once where that fits


@pytest.mark.parametrize("passes", [0, -1, 1.5, "4", True, None])
def test_micro_batches_are_a_number(passes):
    with pytest.raises(StrategyError, match="not a number of micro-batches"):
        planned(None, passes)


@pytest.mark.parametrize("level, blocks", [("none", 0), ("selective", 2), ("full", 2)])
def test_a_level_that_was_asked_for(level, blocks):
    plan = planned("ddp", 1, recompute=level)
    assert len(plan.recomputed) == (blocks if level == "full" else 0)
    assert len(plan.recomputed_selectively) == (blocks if level == "selective" else 0)
    free = planned("ddp", 1)
    less = plan.memory["activations"] < free.memory["activations"]
    assert (plan.recompute_seconds > 0) == less == (level != "none")


def test_a_level_that_does_not_fit_is_refused_with_what_is_missing():
    with pytest.raises(MemoryInfeasibleError, match="with recomputation none no plan fits") as caught:
        planned("ddp", 1, recompute="none", memory_bytes=1e6)
    assert caught.value.missing_bytes > 0
    assert planned("ddp", 1, recompute="none", memory_bytes=1e6, refuses=False).peak_bytes > 1e6
    with pytest.raises(StrategyError, match="use one of auto, none"):
        planned("ddp", 1, recompute="some")
