"""Ops that run again as options of the search: what it charges for them is what a plan that recomputes them costs."""

from __future__ import annotations

import random

import pytest

from autopar.planner.objective.checkpoint_blocks import Blocks
from autopar.planner.objective.checkpoint_min_cut import FULL, Moves, Rematerialization
from autopar.planner.problem.multipliers import Prices
from autopar.planner.solver.dual import Dual
from autopar.planner.solver.local_search import LocalSearch

from .planning import Instance
from .test_checkpoint_min_cut import CASES, MACHINE

PRICE_SECONDS = (
    1e-13,
    1e-11,
    1e-10,
    1e-9,
)  # a byte: from nearly free memory to memory that costs more than any compute


def reruns(model: str, mesh: str, strategy: str | None, byte_seconds: float):
    """A plan at a price of memory, the same as a choice of a dual whose classes may run again, and its blocks."""
    instance, prices = Instance(model, mesh, MACHINE, strategy, batch=16, folded=False), Prices(byte_seconds, True)
    e = instance.evaluate(instance.minimize(prices).choice, prices)
    blocks = Blocks(instance.problem, instance.pricer)
    dual = Dual(instance.problem, instance.hyperedges, instance.allowed, prices, None, blocks.reruns)
    moves = Moves(e, blocks)
    return e, dual, prices, [Rematerialization(blocks, e, block, moves, prices) for block in blocks.members]


def options(dual: Dual, e, rematerialization: Rematerialization, made: frozenset[int]) -> dict[int, int]:
    """The plan's choice with the ops of a set run again."""
    again = {x for i in made if isinstance(x := rematerialization.elements[i], int)}
    return {v: k + len(dual.allowed[v]) if v in again else k for v, k in e.choice.items()}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("byte_seconds", PRICE_SECONDS)
@pytest.mark.parametrize(("model", "mesh", "strategy"), CASES)
def test_a_set_is_charged_what_it_costs(model, mesh, strategy, byte_seconds):
    """One block is taken at a time. Random sets are charged no more than they cost, since the search may still decide
    which copies are kept; the best set at the price, a minimum cut, is charged exactly that."""
    e, dual, prices, remakes = reruns(model, mesh, strategy, byte_seconds)
    tied, rng = LocalSearch(dual), random.Random(0)
    before = tied.objective(e.choice)
    assert before == pytest.approx(e.priced(prices))
    for rematerialization in remakes:
        full = rematerialization.at(FULL)
        seconds, bytes_ = rematerialization.cost(frozenset())

        def more(made, rematerialization=rematerialization, seconds=seconds, bytes_=bytes_):
            s, b = rematerialization.cost(made)
            return s - seconds + byte_seconds * (b - bytes_)

        for _ in range(30):
            made = frozenset(rng.sample(sorted(full), rng.randint(1, len(full)))) if full else frozenset()
            assert tied.objective(options(dual, e, rematerialization, made)) <= before + more(made) + 1e-9 * before
        best = rematerialization._cut(byte_seconds, frozenset(), full)
        assert tied.objective(options(dual, e, rematerialization, best)) == pytest.approx(before + more(best), rel=1e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("model", "mesh", "strategy"), CASES[::2])
def test_bounds_hold_for_plans_that_recompute(model, mesh, strategy):
    """The bound of the dual is below its own choices and below every plan with the best recomputation at the price."""
    for byte_seconds in PRICE_SECONDS:
        e, dual, prices, remakes = reruns(model, mesh, strategy, byte_seconds)
        plan = e.priced(prices)
        for rematerialization in remakes:
            best = rematerialization._cut(byte_seconds, frozenset(), rematerialization.at(FULL))
            (s, b), (least, fewer) = rematerialization.cost(frozenset()), rematerialization.cost(best)
            plan += least - s + byte_seconds * (fewer - b)
        for _ in range(12):
            dual.sweep(True)
            dual.sweep(False)
        rounded = dual.round()
        assert dual.bound() <= min(plan, LocalSearch(dual).objective(rounded)) * (1 + 1e-9)
        assert LocalSearch(dual).objective(LocalSearch(dual).improve(rounded)) <= plan * 1.05
