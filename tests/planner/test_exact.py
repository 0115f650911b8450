"""The search against every plan there is: brute force on few choices, the integer program on whole small problems."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from autopar.planner.problem.multipliers import Prices
from autopar.planner.solver.minimize import Search

from .planning import TINY_GPT, Instance, toy
from .random_graphs import MESHES, PRICES, WAITING, check, read_often

GAP = Search().gap
MLP = "mlp:hidden=8,layers=1"


def few_choices(instance: Instance, rng: random.Random, most: int = 700) -> dict[int, np.ndarray]:
    """Masks that leave up to four strategies, the replicated one among them, to some classes, and that one to the
    others: at most `most` plans in all, and the replicated plan always possible."""
    masks = {cls: np.arange(len(options.strategies)) == 0 for cls, options in instance.problem.classes.items()}
    plans = 1
    for cls in rng.sample(sorted(masks), len(masks)):
        chosen = rng.sample(range(len(masks[cls])), min(len(masks[cls]), rng.randint(2, 4)))
        masks[cls][chosen] = True
        if plans * masks[cls].sum() > most:
            masks[cls][1:] = False
        plans *= masks[cls].sum()
    return masks


def every_plan(masks: dict[int, np.ndarray]):
    for picked in itertools.product(*(np.flatnonzero(mask).tolist() for mask in masks.values())):
        yield dict(zip(masks, picked))


@pytest.mark.parametrize("seed", range(10))
def test_small_random_graphs(seed):
    """All plans of graphs of up to 8 nodes, up to 50,000 of them: the search, the judge and HiGHS agree on the best
    (200 such graphs: `benchmarks/exact.py`)."""
    assert check(seed, 50_000).plans > 1


@pytest.mark.parametrize("seed", range(8))
def test_copies_that_micro_batches_share(seed):
    """The same where copies of parameters that are kept are made once a step, for all its passes."""
    check(seed, 20_000, shared_by=2 + seed % 3)


@pytest.mark.parametrize("seed", range(8))
def test_gradients_that_are_reduced_in_a_narrow_type(seed):
    check(seed, 20_000, reduce_dtype=torch.bfloat16)


@pytest.mark.parametrize("seed", [7, 18, 36])
def test_a_parameter_that_many_ops_read(seed):
    """The dual shares such a hyperedge among factors of a few consumers: of those that see one phase alone, none says
    more than what both phases pay together."""
    check(seed, 20_000, shared_by=4, draw=read_often)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(8))
def test_brute_force(seed):
    """No plan among all is better than what the search finds, and none is below its bound."""
    rng = random.Random(seed)
    mesh, price = rng.choice(MESHES), rng.choice(PRICES)
    instance = Instance(
        rng.choice([MLP, "mlp:hidden=6,layers=1", TINY_GPT]), mesh, rng.choice([toy(), WAITING]), batch=6
    )
    masks = few_choices(instance, rng)
    found = instance.minimize(*price, masks)
    best = min(instance.objective(choice, *price) for choice in every_plan(masks))
    assert found.objective == pytest.approx(instance.objective(found.choice, *price), rel=1e-9)
    assert found.bound <= best * (1 + 1e-9) and best <= found.objective * (1 + 1e-9)
    assert found.objective <= best * (1 + GAP)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("model", "mesh", "folded"), [
    (MLP, "a=2", True), (MLP, "a=4", False), (MLP, "a=2,b=2", True), (TINY_GPT, "a=2", False), (TINY_GPT, "a=4", True),
])  # fmt: skip
def test_integer_program(model, mesh, folded):
    """The ascent's plan is optimal within its gap, its bound a bound, by HiGHS on the same problem."""
    for hardware, price in itertools.product((toy(), WAITING), ((Prices(), None), (Prices(1e-9), False))):
        instance = Instance(model, mesh, hardware, folded=folded)
        found = instance.minimize(*price)
        exact = instance.program(*price).solve(60, 1e-6)
        assert exact.objective == pytest.approx(instance.objective(exact.choice, *price), rel=1e-6)
        assert found.objective == pytest.approx(instance.objective(found.choice, *price), rel=1e-9)
        assert found.objective <= exact.objective * (1 + GAP)
        assert found.bound <= exact.objective * (1 + 1e-6)


@pytest.mark.parametrize("price", PRICES, ids=str)
@pytest.mark.slow
def test_bound_and_judge_with_a_price_on_memory(price):
    """The gap closes with every price on memory, and the folded objective is the cost of the unfolded plan. Copies of
    parameters that must be kept (zero1 and zero2 short of memory) leave the widest gap: their program is not solved to
    the end in time."""
    widest = 2e-2 if price[1] else 1e-2
    for mesh in MESHES:
        instance = Instance("gpt:hidden=32,layers=2,heads=4,vocab=64,seq=16", mesh)
        found = instance.minimize(*price, search=Search(program_seconds=1))
        assert found.objective == pytest.approx(instance.objective(found.choice, *price), rel=1e-9)
        assert 0 <= found.objective - found.bound <= widest * found.objective


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("model", "mesh", "loss"), [
    ("mlp:hidden=8,layers=2", "a=2", 0.0), ("mlp:hidden=8,layers=3", "a=2,b=2", 5e-3),
    ("gpt:hidden=32,layers=2,heads=4,vocab=64,seq=16", "a=4", 0.0),
    ("llama:hidden=32,layers=2,heads=4,kv_heads=2,ffn=64,vocab=64,seq=16", "a=2", 0.0),
])  # fmt: skip
def test_folding_loses_nothing(model, mesh, loss):
    """Equal blocks that share their choice are as good as free ones; they are never better, which would be a false
    cost."""
    objective, bound = {}, {}
    for folded in (True, False):
        instance = Instance(model, mesh, WAITING, folded=folded)
        found = instance.minimize()
        objective[folded], bound[folded] = instance.evaluate(found.choice).seconds, found.bound
        assert objective[folded] == pytest.approx(found.objective, rel=1e-9)
    assert objective[True] >= bound[False] * (1 - 1e-9)
    assert objective[True] <= objective[False] * (1 + GAP + loss)


def test_classes_do_not_grow_with_the_number_of_blocks():
    counts = [len(Instance(f"gpt:hidden=32,layers={n},heads=4,vocab=64,seq=16", "a=2").problem.classes) for n in (3, 4)]
    assert counts[0] == counts[1]
    whole = len(Instance("gpt:hidden=32,layers=4,heads=4,vocab=64,seq=16", "a=2", folded=False).problem.classes)
    assert counts[0] < whole / 2
