"""The planner's promises: exact where it can be checked, bounds that hold, limits that are kept, experts never
better."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import StrategyError
from autopar.planner.problem.multipliers import Prices
from autopar.planner.solver.minimize import Search
from tests.planner.planning import TINY_GPT, TINY_LLAMA, Instance, captured, counts, make, make_anew, toy

MLP = "mlp:hidden=16,ffn=32,layers=1"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("hardware", [toy(), toy(latency=2e-6), toy(link=1e7)], ids=["even", "waiting", "slow link"])
@pytest.mark.parametrize(("model", "mesh"), [(MLP, "a=2,b=2"), pytest.param(TINY_GPT, "a=2", marks=pytest.mark.slow)])
def test_ascent_agrees_with_the_integer_program_on_the_unfolded_graph(model, mesh, hardware):
    folded, whole = Instance(model, mesh, hardware), Instance(model, mesh, hardware, folded=False)
    found = folded.minimize(search=Search(gap=1e-6))
    exact = whole.program().solve(60, 1e-7)
    assert found.bound <= exact.objective * (1 + 1e-6)
    assert found.objective >= exact.objective * (1 - 1e-6)
    assert found.objective <= exact.objective * (1 + 2e-3)
    assert found.objective == pytest.approx(folded.objective(found.choice), rel=1e-9)


@functools.cache
def with_link(link: float) -> Instance:
    return Instance(MLP.replace("layers=1", "layers=2"), "a=2", toy(link=link))


@settings(max_examples=4, deadline=None, derandomize=True)
@given(price=st.floats(1e-13, 1e-7), link=st.sampled_from([1e7, 1e9, 1e10]), keep=st.sampled_from([None, False, True]))
def test_the_objective_is_the_unfolded_cost_at_any_price_of_memory(price, link, keep):
    instance = with_link(link)
    keep = None if keep else keep
    found = instance.minimize(Prices(price, True), keep, search=Search(program_seconds=2))
    assert found.bound <= found.objective * (1 + 1e-9)
    e = instance.evaluate(found.choice, Prices(price, True), keep)
    assert e.priced(Prices(price, True)) == pytest.approx(found.objective, rel=1e-9)


@pytest.mark.slow
def test_the_dual_bound_holds_for_expert_plans():
    for mesh in ("a=2", "a=2,b=2"):
        free = Instance(TINY_LLAMA, mesh)
        bound = free.minimize().bound
        experts = [a for a in make(TINY_LLAMA, mesh, baselines=True).alternatives if a.step_seconds is not None]
        assert len(experts) >= 6
        for expert in experts:
            assert expert.step_seconds >= bound * (1 - 1e-9), expert.name


def test_column_then_row_is_found_among_the_four():
    """A Megatron MLP: one all-reduce forward; pinned to the other combinations it costs more."""
    free = make(MLP, "tp=2", toy(link=1e7), strategy="megatron")
    weights = {k: v for k, v in free.layouts.items() if k.endswith("weight")}
    assert list(weights.values()) == ["tp:S(0)", "tp:S(1)"]
    names = list(weights)
    forward = [c for c in free.collectives if c.phase == "forward" and c.kind == "all_reduce"]
    assert sum(c.count for c in forward) == 1
    for first, second in ((0, 0), (1, 0), (1, 1)):
        pinned = make(
            MLP,
            "tp=2",
            toy(link=1e7),
            strategy="megatron",
            pin={names[0]: f"tp:S({first})", names[1]: f"tp:S({second})"},
        )
        assert pinned.step_seconds > free.step_seconds, (first, second)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp", "hsdp", "megatron", "megatron_sp"])
def test_strategies_place_parameters_as_named(strategy):
    plan = make(TINY_GPT, "r=2,s=2", strategy=strategy)
    matrices = {k: v for k, v in plan.layouts.items() if k.endswith("weight") and "ln" not in k}
    expected = {
        "ddp": lambda t: t == "R",
        "zero1": lambda t: "r:S" in t and "s:S" in t,
        "zero2": lambda t: "r:S" in t and "s:S" in t,
        "fsdp": lambda t: "r:S" in t and "s:S" in t,
        "hsdp": lambda t: "r:" not in t and "s:S" in t,
        "megatron": lambda t: "r:" not in t and "s:S" in t,
        "megatron_sp": lambda t: "r:" not in t and "s:S" in t,
    }[strategy]
    assert all(expected(t) for t in matrices.values()), matrices
    assert plan.layouts["input_ids"].startswith("r:S(0)")
    if strategy in ("zero1", "zero2"):
        assert plan.memory["gathered parameters kept"] > 0
    if strategy == "fsdp":
        assert "gathered parameters kept" not in plan.memory
        assert counts(plan, "backward")["all_gather"] > 0


def test_zero_memory_follows_the_table():
    """fp32 AdamW: 16 bytes a parameter; ZeRO-1 keeps the gradients of several passes whole, ZeRO-3 divides everything
    by N."""
    whole = make(TINY_GPT, "dp=4", strategy="ddp").memory
    parameters = whole["parameters"] / 4
    assert whole["gradients"] == 4 * parameters and whole["optimizer"] == 8 * parameters
    three = make(TINY_GPT, "dp=4", strategy="fsdp").memory
    assert three["parameters"] + three["gradients"] + three["optimizer"] == pytest.approx(16 * parameters / 4, rel=0.01)
    one = make(TINY_GPT, "dp=4", strategy="zero1", micro_batches=2).memory
    assert one["gradients"] == pytest.approx(whole["gradients"], rel=0.01)
    assert one["optimizer"] == pytest.approx(whole["optimizer"] / 4, rel=0.01)


def test_pins_and_their_errors():
    plan = make(TINY_GPT, "dp=2,tp=2", pin={"*.c_fc.weight": "tp:S(0)"})
    assert all("tp:S(0)" in v for k, v in plan.layouts.items() if k.endswith("c_fc.weight"))
    with pytest.raises(StrategyError, match="nearest"):
        make(TINY_GPT, "dp=2", pin={"*.query.weight": "dp:S(0)"})


def test_equal_plans_are_equal_bytes():
    one, other = (make_anew(captured(TINY_LLAMA), "dp=2,tp=2", toy()) for _ in range(2))
    assert one.to_json() == other.to_json()
