"""Plans under a limit of bytes per device: they fit, cost little more than the bound, and say what is missing if none
fits."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from autopar.cost.memory import OPTIMIZERS
from autopar.errors import MemoryInfeasibleError
from autopar.planner.objective.evaluate import evaluate
from autopar.planner.problem.multipliers import Prices
from autopar.planner.solver.interpolate import keep_copies, mix

from .planning import Instance, make, toy

GPT = "gpt:hidden=64,layers=2,heads=4,vocab=64,seq=16"
SMALL = "mlp:hidden=64,layers=2"
DEAR = Prices(1e-7, True)
MACHINE = toy(flops=1e11, memory=1e10, latency=1e-6, bucket=1 << 16)  # the batch is worth sharding, parameters are not


def sharded(plan) -> int:
    return sum("S" in layout for name, layout in plan.layouts.items() if name.endswith(("weight", "bias")))


def test_less_memory_shards_more_parameters_and_costs_more(monkeypatch):
    """Between the plan without a limit and the smallest, parameters become sharded a few at a time; the
    optimizer's update, which alone would be worth sharding them, takes no time."""
    monkeypatch.setitem(OPTIMIZERS, "at once", replace(OPTIMIZERS["adamw"], sweeps=0))
    free = make(GPT, "dp=4", MACHINE, strategy=None, optimizer="at once", batch=256)
    least = make(GPT, "dp=4", MACHINE, strategy="fsdp", optimizer="at once", batch=256).peak_bytes
    limits = [least + part * (free.peak_bytes - least) for part in (1, 0.6, 0.1)]
    plans = [make(GPT, "dp=4", MACHINE, optimizer="at once", batch=256, memory_bytes=limit) for limit in limits]
    assert plans[0].step_seconds == free.step_seconds
    for plan, next_ in zip(plans, plans[1:]):
        assert plan.peak_bytes <= plan.memory_limit_bytes and plan.gap <= 0.02
        assert next_.step_seconds >= plan.step_seconds
    assert len({sharded(plan) for plan in plans}) == 3


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", ["a=4", "a=2,b=2"])
def test_mixed_plans_fit_and_are_not_slower(mesh):
    """For any limit between two plans: the mix fits, is at least as fast as the one that fits, and is judged as it
    is."""
    instance = Instance(GPT, mesh, replace(MACHINE, memory_bytes_per_second=1e13), batch=64)
    ends = []
    for price in (1e-16, 1e-7):
        found = instance.minimize(Prices(price, True))
        ends.append(instance.evaluate(found.choice, DEAR))
    fast, lean = ends
    assert lean.bytes_ < fast.bytes_ and lean.seconds > fast.seconds
    rng, met = random.Random(0), set()
    for share in [rng.random() for _ in range(6)]:
        limit = lean.bytes_ + share * (fast.bytes_ - lean.bytes_)
        judged = []

        def judge(choice, first, judged=judged):
            judged.append(evaluate(instance.problem, choice, instance.pricer, DEAR, first=first))
            return judged[-1]

        mixed = mix(instance.problem, lean, fast, limit, judge)
        assert mixed.bytes_ <= limit and fast.seconds - 1e-12 <= mixed.seconds <= lean.seconds
        changed = [
            [v.cls for v in instance.problem.vertices if e.choice[v.index] != lean.choice[v.index]] for e in judged
        ]
        kinds = {tuple(sorted(classes)) for classes in changed}
        assert len(judged) <= 3 + 2 * len(kinds)  # equal blocks are judged once each way
        met.add(round(mixed.seconds, 12))
    assert len(met) >= 3


def test_copies_are_kept_as_far_as_they_fit():
    """Fully sharded parameters are gathered once and kept while memory lasts, and again in the backward beyond."""
    instance = Instance(GPT, "a=4", MACHINE, strategy="fsdp", batch=64)
    found = instance.minimize(Prices(1e-12, True), False)
    none, every = (instance.evaluate(found.choice, keep=keep) for keep in (False, True))
    before = none.seconds
    for share in (0.0, 0.3, 0.6, 1.0):
        limit = none.bytes_ + share * (every.bytes_ - none.bytes_) + 1
        kept = keep_copies(instance.problem, none, limit, instance.pricer)
        assert kept.bytes_ <= limit and kept.seconds <= before
        assert len(kept.transfers) + len(kept.retained - none.retained) == len(none.transfers)
        before = kept.seconds
    assert kept.seconds == pytest.approx(every.seconds) and kept.bytes_ == pytest.approx(every.bytes_)


def test_blocks_are_recomputed_when_only_activations_are_too_many():
    free = make(GPT, "dp=2", MACHINE, batch=512, strategy="ddp")
    activations = free.memory["activations"]
    plan = make(GPT, "dp=2", MACHINE, batch=512, strategy="ddp", memory_bytes=free.peak_bytes - 0.2 * activations)
    again = {*plan.recomputed, *plan.recomputed_selectively}
    assert again and plan.peak_bytes <= plan.memory_limit_bytes
    assert plan.step_seconds == pytest.approx(free.step_seconds + plan.recompute_seconds)
    assert again <= {f"h.{i}" for i in range(2)} and len(plan.recomputed) < 2


def test_what_is_missing():
    with pytest.raises(MemoryInfeasibleError) as error:
        make(SMALL, "dp=2", MACHINE, memory_bytes=1e5, batch=64)
    need = 1e5 + error.value.missing_bytes
    assert sum(error.value.breakdown.values()) == pytest.approx(need, rel=1e-3)
    assert "memory=" in error.value.fix and "devices" in error.value.fix
    plan = make(SMALL, "dp=2", MACHINE, memory_bytes=1.02 * need, batch=64)  # what it says would fit does fit
    assert plan.peak_bytes <= 1.02 * need


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{}, {"recompute": "full"}, {"refuses": False}], ids=str)
def test_what_is_reserved_is_not_for_tensors(options):
    """A reserve moves the peak, the smallest limit and what is missing by itself, whoever judges whether a plan
    fits."""
    reserve = 3e6
    plain, reserving = ({"hardware": h, "batch": 64} for h in (MACHINE, replace(MACHINE, reserve_bytes=int(reserve))))
    limit = 0.8 * make(GPT, "dp=2", **plain).peak_bytes
    small = make(GPT, "dp=2", **plain, **options, memory_bytes=limit)
    large = make(GPT, "dp=2", **reserving, **options, memory_bytes=limit + reserve)
    assert (large.layouts, large.step_seconds) == (small.layouts, small.step_seconds)
    assert large.peak_bytes == pytest.approx(small.peak_bytes + reserve)
    # which of the copies that cost nothing are kept may differ: prices are in units of the limit
    assert large.memory == pytest.approx(small.memory | {"allocator reserve": reserve}, rel=0.02)


def test_what_is_reserved_is_missing_too():
    missing = {}
    for reserve in (0, 10**6):
        with pytest.raises(MemoryInfeasibleError) as error:
            make(SMALL, "dp=2", replace(MACHINE, reserve_bytes=reserve), memory_bytes=2e5, batch=64)
        missing[reserve] = error.value.missing_bytes
        assert error.value.breakdown.get("allocator reserve", 0) == reserve
        assert sum(error.value.breakdown.values()) == pytest.approx(2e5 + error.value.missing_bytes, rel=1e-3)
    assert missing[10**6] == pytest.approx(missing[0] + 10**6, rel=0.01)
