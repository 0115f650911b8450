"""Bytes beside compute: an emitted graph hides what its plan does."""

from __future__ import annotations

import pytest

from autopar.simulate import census
from autopar.simulate.census import Census
from benchmarks.overlap import LARGE, LOW, TINY, Case

LLAMA = "llama:hidden=64,layers=3,heads=4,kv_heads=2,ffn=160,vocab=128"
SMALL = [
    Case(LLAMA, "dp=4,tp=2", strategy, 8, 32, 3e4)
    for strategy in ("fsdp", "hsdp", "megatron_sp+fsdp", "megatron_sp+zero1", "zero1", None)
]


def check(case: Case) -> None:
    planned, program = case.lowered()
    plan, graphs = census.of_plan(planned), census.of_graphs(program)
    assert graphs.moved == pytest.approx(plan.moved, rel=1e-3)
    assert plan.overlapped > 0 and graphs.overlapped >= LOW * plan.overlapped


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", [*TINY, *SMALL], ids=str)
def test_graphs_hide_what_their_plan_hides(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large_graphs_hide_what_their_plan_hides(case):
    check(case)


def test_a_collective_is_hidden_by_what_runs_before_its_wait():
    hideable = {"a": 10.0, "b": 1.0}
    steps = [("start", "a"), ("start", "b"), ("wait", "b"), ("work", "mm"), ("wait", "a"), ("wait", "other")]
    assert census._of_steps(steps, hideable) == Census(11.0, 10.0)


def test_what_waits_for_nothing_but_parameters_and_what_nothing_waits_for():
    """FSDP gathers the parameters and reduces the gradients; nothing else may be hidden."""
    _, program = Case(LLAMA, "dp=4", "fsdp", 8, 32, 3e4).lowered()
    named = census.hideable_of(program)
    moves = [n for n in program.local.graph.nodes if n.meta.get("collective")]
    kinds = {n.meta["collective"].kind for n in moves if n.name in named}
    assert kinds == {"all_gather", "reduce_scatter"}
    assert {n.meta["collective"].kind for n in moves if n.name not in named} == {"all_reduce"}  # of the loss
