"""Bytes: what a plan predicts is what the emitted graph sends, collective by collective, for every strategy."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from autopar.compiler import lower
from autopar.models import registry
from autopar.planner.problem.recipes import RECIPES
from autopar.plans.plan import Plan
from autopar.simulate import step as simulated
from autopar.simulate.oracle import global_values

from .planning import captured, make, toy

GPT = "gpt:hidden=32,layers=1,heads=4,vocab=64,seq=16"
LLAMA = "llama:hidden=32,layers=2,heads=4,kv_heads=4,ffn=64,vocab=64"
MACHINE = toy(flops=1e9, memory=1e10, latency=1e-6)


def predicted(plan: Plan) -> Counter:
    """Bytes sent by (kind, axes, phase)."""
    found: Counter = Counter()
    for c in plan.collectives:
        found[c.kind, c.axes, c.phase] += c.wire_bytes
    return found


def emitted(graph, plan: Plan, rank: int) -> Counter:
    found: Counter = Counter()
    for node in lower(graph, plan, rank).local.graph.nodes:
        if c := node.meta.get("collective"):
            found[c.kind, c.axes, c.phase] += c.wire_bytes
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recompute", ["auto", "selective", "full"])
@pytest.mark.parametrize(("model", "mesh", "strategy"), [
    *((GPT, "dp=4", strategy) for strategy in ("auto", *RECIPES)),
    *((LLAMA, "dp=2,tp=2", strategy) for strategy in ("auto", "megatron_sp", "megatron_sp+fsdp")),
])  # fmt: skip
def test_predicted_is_emitted(model, mesh, strategy, recompute):
    mesh = "a=2,b=2" if strategy == "hsdp" else mesh
    plan, graph = make(model, mesh, MACHINE, strategy=strategy, recompute=recompute), captured(model)
    assert bool(plan.recomputed) == (recompute == "full")
    said = predicted(plan)
    for reduce_scatter in ("native", "all_to_all"):
        for rank in (0, 3):
            sent = emitted(graph, replace(plan, reduce_scatter=reduce_scatter), rank)
            assert set(said) == set(sent)
            assert {key: round(value) for key, value in said.items()} == {
                key: round(value) for key, value in sent.items()
            }


@pytest.mark.slow
@pytest.mark.parametrize("shares", [(0.1, 0.5), pytest.param((0.3, 0.8), marks=pytest.mark.slow)])
def test_what_some_blocks_recompute_is_predicted(shares, mesh="dp=2,tp=2"):
    """Limits between the plan without one and the smallest: some blocks recompute, some keep what they gathered."""
    deep = GPT.replace("layers=1", "layers=3")
    graph, free = captured(deep, 64), make(deep, mesh, MACHINE, batch=64)
    least = make(deep, mesh, MACHINE, batch=64, strategy="fsdp", recompute="full").peak_bytes
    recomputing = 0
    for share in shares:
        plan = make(deep, mesh, MACHINE, batch=64, memory_bytes=least + share * (free.peak_bytes - least))
        recomputing += any(name.startswith("linear") for name in plan.sharding.recomputed)  # more than what is cheap
        sent = emitted(graph, plan, 1)
        assert {k: round(v) for k, v in predicted(plan).items()} == {k: round(v) for k, v in sent.items()}
    assert recomputing


def test_parameters_are_gathered_twice_not_three_times():
    """A recomputed block's second forward and its backward share what is gathered for the former, as in FSDP."""
    graph, plans = (
        captured(GPT),
        [make(GPT, "dp=4", MACHINE, strategy="fsdp", recompute=level) for level in ("none", "full")],
    )
    for plan in plans:
        gathered = Counter()
        for node in lower(graph, plan, 0).local.graph.nodes:
            if (c := node.meta.get("collective")) and c.kind == "all_gather":
                gathered[c.tensor, c.phase] += 1
        assert set(gathered.values()) == {1}
    matrices = {key: value for key, value in predicted(plans[0]).items() if key[0] == "reduce_scatter"}
    assert matrices == {key: value for key, value in predicted(plans[1]).items() if key[0] == "reduce_scatter"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("strategy", "mesh"), [("auto", "dp=2,tp=2"), ("fsdp", "dp=4"), ("megatron_sp", "tp=2"), ("zero2", "dp=2")]
)
def test_simulated_ranks_send_what_was_predicted(strategy, mesh):
    plan, graph = make(GPT, mesh, MACHINE, strategy=strategy), captured(GPT)
    model, inputs = registry.build(GPT, batch=8, seq=16, device="cpu")
    step = simulated.simulate_step(graph, plan, global_values(graph, model, inputs))
    for sent in step.bytes_sent:
        assert sent == pytest.approx(sum(c.wire_bytes for c in plan.collectives), abs=64)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(("strategy", "times"), [("ddp", 2), ("zero1", 2), ("zero2", 2), ("fsdp", 3)])
def test_data_parallel_bytes_by_formula(strategy, times, n):
    """(n - 1) / n of the parameters' bytes, twice, or three times where they are gathered again (ZeRO,
    arXiv 1910.02054, 7)."""
    plan = make(LLAMA, f"dp={n}", toy(flops=1e9, memory=1e10), strategy=strategy)
    model, _ = registry.build(LLAMA, batch=8, seq=16, device="meta")
    bytes_ = {name: 4 * p.numel() for name, p in model.named_parameters()}
    total = times * (n - 1) / n * sum(bytes_.values())
    # norms and embedding are read by the forward alone, so ZeRO-3 has no second gather of them
    once = sum(b for name, b in bytes_.items() if "embed" in name) * (n - 1) / n if strategy == "fsdp" else 0
    loss = 64 * n  # the mean loss and its count are summed
    norms = sum(b for name, b in bytes_.items() if "norm" in name) * (n - 1) / n
    sent = sum(c.wire_bytes for c in plan.collectives)
    assert total - once - norms - 1 <= sent <= total - once + loss


def test_gather_of_uneven_shards_is_counted_padded():
    """A vocabulary of 65 over 4: 17 rows a device but the last; collectives carry blocks of 17."""
    model = "gpt:hidden=32,layers=1,heads=4,vocab=65,seq=16"
    plan, graph = make(model, "dp=4", MACHINE, strategy="fsdp"), captured(model)
    said, sent = sum(predicted(plan).values()), [sum(emitted(graph, plan, r).values()) for r in (0, 3)]
    assert sent[0] == sent[1] and said <= sent[0] <= said * 1.03
