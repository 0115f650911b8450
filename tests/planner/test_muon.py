"""optimizer="muon": the gathers and products of its step are in the plan's seconds, by closed formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest

import autopar
from autopar import compiler
from autopar.cost.orthogonalize import STEPS
from autopar.cost.product_seconds import ProductSeconds
from autopar.errors import StrategyError
from autopar.models import registry
from autopar.planner.problem.hidden_matrices import hidden_matrices

from .planning import toy

MODEL = "gpt:hidden=32,layers=2,heads=4,vocab=64,seq=16"
LINK, MEMORY = 1e9, 4e10
MACHINE = replace(toy(link=LINK, memory=MEMORY))


def model_of():
    return registry.build(MODEL, batch=8, seq=16, device="meta")


def shapes() -> tuple[list[tuple[int, int]], int]:
    """The shapes of what Muon updates, and the elements of the rest, embeddings among it (the head is tied)."""
    named = dict(model_of()[0].named_parameters())
    matrices = {n: tuple(p.shape) for n, p in named.items() if p.dim() == 2 and "wte" not in n and "wpe" not in n}
    return list(matrices.values()), sum(p.numel() for n, p in named.items() if n not in matrices)


def plan(mesh: str, **options) -> autopar.Plan:
    options = {"optimizer": "muon", "hardware": MACHINE, "baselines": False} | options
    return autopar.plan(*(lambda m, i: (m, mesh, i))(*model_of()), **options)


def of_update(found: autopar.Plan) -> list:
    return [c for c in found.collectives if c.phase == "optimizer"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("mesh, strategy, n, is_cut", [("dp=4", "ddp", 4, False), ("dp=4", "fsdp", 4, True),
                                                       ("dp=2", "zero1", 2, True)])  # fmt: skip
def test_seconds_bytes_and_state(mesh, strategy, n, is_cut, micro_batches):
    """Gathers send (n - 1) / n of two bytes an element; matrices have one tensor of state, the rest two, through which
    an update goes once."""
    matrices, rest = shapes()
    found = plan(mesh, strategy=strategy, micro_batches=micro_batches)
    elements = sum(m * k for m, k in matrices)
    sent = 2 * elements * (n - 1) / n if is_cut else 0.0
    gathers = of_update(found)
    assert sum(c.wire_bytes for c in gathers) == pytest.approx(sent)
    assert sum(c.count for c in gathers) == (len(matrices) if is_cut else 0)
    assert sum(c.seconds for c in gathers) == pytest.approx(sent / LINK)

    seconds, peak = ProductSeconds(MACHINE), MACHINE.peak_flops_per_second("bf16")
    products = 0.0
    for m, k in map(sorted, matrices):
        one = ((1, m, m, k), (1, m, m, m), (1, m, k, m))
        products += STEPS * sum(seconds(p, peak, 2) for p in one)
    moved = (20 * elements + 28 * rest) / (n if is_cut else 1) / MEMORY
    assert found.update_seconds == pytest.approx(products + sent / LINK + moved, rel=1e-2)  # biases may stay whole
    assert found.memory["optimizer"] == pytest.approx(4 * (elements + 2 * rest) / (n if is_cut else 1), rel=1e-2)
    parts = found.compute_seconds + found.communication_seconds + found.recompute_seconds + found.update_seconds
    assert found.step_seconds == pytest.approx(parts)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "model, others",
    [
        ("gpt2-tiny:layers=1", {"wte.weight", "wpe.weight"}),
        ("llama:hidden=32,layers=1,heads=4,kv_heads=2,ffn=48,vocab=96", {"embed_tokens.weight", "lm_head.weight"}),
        ("mlp-tiny:layers=1", {"blocks.0.down.weight"}),
    ],
)
def test_heads_and_embeddings_are_not_muons(model, others, precision):
    source, inputs = registry.build(model, batch=4, seq=16, device="meta")
    matrices = {name for name, p in source.named_parameters() if p.dim() == 2}
    graph = compiler.trace(source, inputs, precision=precision).graph
    assert {n.meta["role"].name for n in hidden_matrices(graph)} == matrices - others


@pytest.mark.slow
def test_the_search_weighs_the_gathers():
    """A plan for Muon gathers less in its step where links are slow than what AdamW's plan would make it gather."""
    slow = replace(MACHINE, links=tuple(replace(x, bytes_per_second=x.bytes_per_second / 100) for x in MACHINE.links))
    ours = plan("dp=4", hardware=slow)
    given = plan("dp=4", hardware=slow, optimizer="adamw")
    pinned = plan(
        "dp=4", hardware=slow, pin={n: x for n, x in given.layouts.items() if n not in ("input_ids", "labels")}
    )
    assert ours.step_seconds <= pinned.step_seconds * (1 + ours.gap) and ours.step_seconds < given.step_seconds + 1


def test_stages_and_files(tmp_path):
    found = plan("pp=2,dp=2", strategy="fsdp", micro_batches=2)
    assert of_update(found) and "optimizer all_gather" in str(found)
    found.save(tmp_path / "plan.json")
    assert autopar.Plan.load(tmp_path / "plan.json") == found


@pytest.mark.parametrize("options", [dict(state_dtype="bf16"), dict(offload="optimizer"), dict(offload="auto")])
def test_what_is_not_priced_is_refused(options):
    with pytest.raises(StrategyError, match="leave out state_dtype and offload"):
        plan("dp=2", hardware="h100", **options)
