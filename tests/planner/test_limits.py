"""Under limits of memory: what fits is found, less memory gives no faster plan, and the integer program says what it
decided."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.planner.solver.dual import Dual
from autopar.plans.plan import Plan
from autopar.plans.program import DecidedProgram

from .planning import Instance, make, toy
from .random_graphs import PRICES, WAITING
from .random_limits import check_limits

GPT = "gpt:hidden=32,layers=2,heads=4,vocab=64,seq=16"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5, 7, 8, 9])
def test_no_limit_is_refused_that_a_plan_fits(seed):
    """All plans of random graphs, each with what it has to compute again: none fits where the search refuses, no bound
    is above one, and no limit gives a slower plan than a smaller one (more graphs: `benchmarks/exact.py --limits`)."""
    found = check_limits(seed, 100)
    assert found and not any(np.isinf(limit.found) or limit.is_slower for limit in found), found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", [6, 8])
def test_a_way_over_larger_plans_is_found(seed):
    """Descents from the plans that prices find end above the least limits of these graphs."""
    assert not any(np.isinf(limit.found) for limit in check_limits(seed, 400)), seed


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", [122, 106, 114, 125])
def test_the_best_plan_of_a_small_graph_is_found(seed):
    """Descents alone end up to 38 % above it, at 122 and 125 above what they find under less memory."""
    assert all(limit.found <= limit.best * (1 + 1e-6) for limit in check_limits(seed, 400)), seed


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["a=4", "a=2,b=2"])
def test_less_memory_is_never_faster(mesh):
    machine = toy(flops=1e11, memory=1e10, latency=1e-6, bucket=1 << 16)
    free = make(GPT, mesh, machine, batch=64)
    plans = [
        make(GPT, mesh, machine, batch=64, memory_bytes=share * free.peak_bytes) for share in (0.8, 0.9, 0.95, 1.0)
    ]
    seconds = [plan.step_seconds for plan in plans]
    assert seconds == sorted(seconds, reverse=True)
    assert all(plan.bound <= plan.step_seconds for plan in plans)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("share", [0.9, 1.0])
def test_the_program_says_what_it_decided(share):
    machine = toy(flops=1e11, memory=1e10, latency=1e-6, bucket=1 << 16)
    free = make(GPT, "a=4", machine, batch=64)
    plan = make(GPT, "a=4", machine, batch=64, memory_bytes=share * free.peak_bytes)
    program = plan.program
    assert 0 < program.excluded < program.choices
    assert program.decided <= program.choices - program.excluded or not program.proved
    assert str(program) in str(plan)
    assert Plan.from_json(plan.to_json()).program == program
    assert make(GPT, "a=4", machine, batch=64, strategy="fsdp").program == DecidedProgram()  # a recipe's has none


def test_texts_of_the_program():
    assert str(DecidedProgram(100, 100)).endswith("none left to decide")
    assert str(DecidedProgram(100, 40)).endswith("too many left for a program (60 could be better)")
    proved = "40 decided with 300 variables, proved best where equal blocks decide alike"
    assert str(DecidedProgram(100, 60, 40, 300, True)).endswith(proved)
    assert str(DecidedProgram(1000, 60, 40, 300)).endswith("not proved (940 could be better)")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("price", [PRICES[1], PRICES[4]], ids=str)
def test_a_restricted_dual_loses_no_better_plan(price):
    """Options are excluded by a plan's cost: the rest has no lower bound than before, and none above that plan."""
    instance = Instance(GPT, "a=2,b=2", WAITING)
    best = instance.minimize(*price)
    dual = Dual(instance.problem, instance.hyperedges, instance.allowed, *price)
    for i in range(40):
        dual.sweep(i % 2 == 0)
    base, reduced = dual.reduced_costs()
    few = dual.restricted([r <= best.objective - base + 1e-12 for r in reduced])
    assert sum(map(len, few.index)) < sum(map(len, dual.index))
    assert few.bound() >= base - 1e-12
    for i in range(20):
        few.sweep(i % 2 == 0)
    assert few.bound() <= best.objective * (1 + 1e-9)
