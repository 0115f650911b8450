"""Tests of what blocks make again: a chain's sets are the best of all, and a step says what a plan with it costs."""

from __future__ import annotations

import itertools
import random

import pytest

from autopar.ir.block_order import block_of
from autopar.planner.objective.checkpoint_blocks import Blocks, taking
from autopar.planner.objective.checkpoint_min_cut import FULL, SELECTIVE, Moves, Rematerialization
from autopar.planner.problem.multipliers import Prices

from .planning import Instance, toy

MLP = "mlp:hidden=16,layers=2"
GPT = "gpt:hidden=32,layers=2,heads=4,vocab=64,seq=16"
LLAMA = "llama:hidden=32,layers=2,heads=4,kv_heads=2,ffn=64,vocab=64,seq=16"
MACHINE = toy(flops=1e10, memory=1e10, latency=1e-6, bucket=1 << 12)
CASES = [(MLP, "dp=2", "fsdp"), (MLP, "tp=2", "megatron"), (GPT, "dp=4", "fsdp"), (GPT, "tp=2", "megatron_sp"),
         (LLAMA, "dp=2,tp=2", None), (LLAMA, "dp=2,tp=2", "megatron_sp+fsdp")]  # fmt: skip


def evaluated(model: str, mesh: str, strategy: str | None, keep: bool | None = None):
    instance = Instance(model, mesh, MACHINE, strategy, batch=16)
    prices = Prices(1e-12, True)
    return instance, instance.evaluate(instance.minimize(prices, keep).choice, prices, keep)


def rematerializations(instance: Instance, e, prices: Prices = Prices()) -> list[Rematerialization]:
    blocks = Blocks(instance.problem, instance.pricer)
    moves = Moves(e, blocks)
    return [Rematerialization(blocks, e, block, moves, prices) for block in blocks.members]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(("model", "mesh", "strategy"), CASES)
def test_no_set_is_cheaper_at_its_price(model, mesh, strategy, keep):
    """Against all sets of a small block, and against random ones of a larger."""
    instance, e = evaluated(model, mesh, strategy, keep)
    rng = random.Random(0)
    for rematerialization in rematerializations(instance, e):
        full = sorted(rematerialization.at(FULL))
        if len(full) <= 10:
            others = [frozenset(s) for n in range(len(full) + 1) for s in itertools.combinations(full, n)]
        else:
            others = [frozenset(rng.sample(full, rng.randint(0, len(full)))) for _ in range(300)]
        chain = [frozenset(), *(made for _, made in rematerialization.chain())]
        others += [*chain, rematerialization.at(SELECTIVE)]
        costs = [rematerialization.cost(made) for made in others]
        for low, high in itertools.pairwise(chain):
            (seconds, bytes_), (more, fewer) = rematerialization.cost(low), rematerialization.cost(high)
            assert low < high and more >= seconds
            if fewer >= bytes_:  # the whole block needs more than it saves
                continue
            price = (more - seconds) / (bytes_ - fewer)
            best = min(s + price * b for s, b in costs)
            assert seconds + price * bytes_ == pytest.approx(more + price * fewer)
            assert seconds + price * bytes_ <= best * (1 + 1e-5) + 1e-15


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("model", "mesh", "strategy"), CASES)
def test_steps_cost_what_they_say(model, mesh, strategy):
    """Taken one after the other they add up, grow dearer, and never make more again than the whole block."""
    instance, e = evaluated(model, mesh, strategy)
    blocks, steps = (
        Blocks(instance.problem, instance.pricer),
        Blocks(instance.problem, instance.pricer).recomputation(e),
    )
    assert steps
    for block in blocks.members:
        mine = [step for step in steps if step.block == block]
        prices = [step.price for step in mine]
        assert prices == sorted(prices) and all(step.freed_bytes > 0 for step in mine)
        made = [v for step in mine for v in step.recomputed]
        assert len(made) == len(set(made)) and set(made) <= set(blocks.members[block])
    every, total = (
        blocks.at_level(e, FULL),
        sum(step.freed_bytes * step.copies for step in blocks.recomputation(e, levels=(FULL,))),
    )
    assert every.saved_bytes == pytest.approx(e.saved_bytes - total)
    assert all(bytes_ > 0 for bytes_ in every.saved.values())
    taken, price = blocks.fit(e, blocks.least_bytes(e) + 1)
    assert taken.bytes_ <= blocks.least_bytes(e) + 1 and price <= max(step.price for step in steps)
    assert taken.seconds >= e.seconds and taken.compute_seconds == e.compute_seconds


@pytest.mark.parametrize("seed", range(3))
def test_prices_rise_from_step_to_step(seed):
    """Whatever the growing sets are: then the cheapest steps of all blocks first are those of a block in order, and
    taking them one after the other frees what is there. Sets that the cuts found may be out of order by their
    rounding, as those of GPT-2 on eight devices under 2.6 GiB are."""
    instance, e = evaluated(LLAMA, "dp=2,tp=2", "megatron_sp+fsdp")
    rng = random.Random(seed)
    for one in rematerializations(instance, e):
        full = sorted(one.at(FULL))
        rng.shuffle(full)
        ends = sorted(rng.sample(range(1, len(full)), 4))
        steps = one.steps([*((str(i), frozenset(full[:i])) for i in ends), (FULL, one.at(FULL))])
        assert steps[-1].level == FULL
        assert all(a.price <= b.price for a, b in itertools.pairwise(steps)), seed
        taken = taking(e, [(step, step.copies) for step in sorted(steps, key=lambda step: step.price)])
        assert sum(taken.saved.values()) == pytest.approx(sum(e.saved.values()) - one.copies * sum(
            step.freed_bytes for step in steps))  # fmt: skip


def test_dear_compute_or_dear_links_change_what_is_made_again():
    """Gathering again is cheap where communication is hidden beside compute; compute is where it is not."""
    instance, e = evaluated(GPT, "dp=4", "fsdp", True)
    gathers, computes = [], []
    for hidden in (0.0, 0.95):
        prices = Prices(overlap=0.9, links=((hidden,), (hidden,)))
        first = [
            rematerialization.steps(rematerialization.chain())[:2]
            for rematerialization in rematerializations(instance, e, prices)
        ]
        gathers.append(sum(len(step.moved) for steps in first for step in steps))
        computes.append(sum(len(step.recomputed) for steps in first for step in steps))
    assert gathers[0] > gathers[1] and computes[0] < computes[1]


def test_cheap_ops_are_selective():
    instance, e = evaluated(GPT, "tp=2", "megatron_sp")
    for rematerialization in rematerializations(instance, e):
        names = {
            instance.problem.vertices[rematerialization.elements[i]].node.target._overloadpacket.__name__
            for i in rematerialization.at(SELECTIVE)
        }
        assert "native_layer_norm" in names and not names & {"linear", "attention"}
        assert (
            rematerialization.at(SELECTIVE) <= rematerialization.at(FULL)
            and block_of(rematerialization.block) == rematerialization.block
        )
