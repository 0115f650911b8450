"""Planned pipelines whose rows run in chunks of their tokens, on all ranks: losses, outputs and gradients are those
of whole rows on one device."""

from __future__ import annotations

import random

import pytest
import torch

import autopar
from autopar.adapt import order
from autopar.api import entry as api
from autopar.errors import MicroBatchError, PipelineError, StrategyError
from autopar.models import build
from autopar.plans.plan import Plan
from autopar.simulate.oracle import global_values, norm, one_device_step, relative_error
from autopar.simulate.pipeline import simulate_pipeline

LLAMA = "llama:layers=4,hidden=16,heads=4,vocab=32,kv_heads={kv_heads}"


def check(text: str, mesh: str, batch: int, tokens: int, note: object = "", **options):
    """The plan, and the step that is simulated by it."""
    model, inputs = build(text, batch=batch, seq=tokens, device="cpu")
    options = dict(hardware="cpu-gloo", baselines=False, precision="fp32") | options
    planned = api.search(model.double(), mesh, inputs, **options)
    with order.attached(model, options.get("adapt", ())):
        values = global_values(planned.captured, model, inputs)
    adapters = {name: torch.randn(value.shape).to(value.dtype) for name, value in values.items() if value.is_meta}
    values |= adapters  # which nobody has made yet
    step, wanted = simulate_pipeline(planned.captured, planned.plan, values), one_device_step(planned.captured, values)
    floor = 1e-4 * max(map(norm, wanted.gradients.values()))
    pairs = [(name, step.gradients[name], value, floor) for name, value in wanted.gradients.items()]
    pairs += [(f"output {i}", step.outputs[str(i)], value, 0.0) for i, value in enumerate(wanted.outputs)]
    assert step.gradients.keys() == wanted.gradients.keys()
    for name, found, value, least in pairs:
        assert relative_error(found, value, least) <= 1e-10, f"{note} {text} {mesh}: {name}"
    return planned.plan, step


MESHES = [
    ("pp=2", None),
    ("pp=4", None),
    ("pp=2,dp=2", "fsdp"),
    ("pp=2,dp=2", "zero1"),
    ("pp=2,tp=2", "megatron_sp"),
    ("pp=2,tp=2", None),
    ("pp=2,cp=2", "all_gather_kv"),
    ("pp=2,cp=2", "ulysses"),
    ("pp=2,dp=2,tp=2", "megatron_sp+zero1"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mesh, strategy", MESHES)
def test_meshes(mesh, strategy):
    seed = random.randrange(10**6)
    draw = random.Random(seed)
    rows, chunks = draw.randint(1, 2), draw.choice([2, 4])
    batch, tokens = rows * draw.choice([2, 3]), chunks * draw.choice([2, 4])
    kv_heads, schedule = draw.choice([2, 4]), draw.choice(["1f1b", "zb_h1", "gpipe", "auto"])
    options = dict(micro_batches=rows, sequence_chunks=chunks, schedule=schedule, strategy=strategy)
    text = LLAMA.format(kv_heads=kv_heads)
    plan, step = check(text, mesh, batch, tokens, f"seed {seed}, batch {batch}, {tokens} tokens, {options}", **options)
    assert (plan.pipeline.row_chunks, plan.micro_batches) == (chunks, rows * chunks)
    assert list(step.in_flight) == [plan.pipeline.played().peak_of_stage(s) for s in range(len(step.in_flight))]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options",
    [
        dict(recompute="full"),
        dict(adapt=[autopar.LoRA(r=2, target_modules="all-linear")]),
        dict(adapt=[autopar.FakeQuant("int8")]),
    ],
)
def test_together_with(options):
    check(LLAMA.format(kv_heads=2), "pp=2,dp=2", 2, 16, sequence_chunks=4, micro_batches=1, **options)


def test_rows_that_chunks_share_unevenly():
    """Three samples in two micro-batches, each in chunks."""
    plan, _ = check(LLAMA.format(kv_heads=2), "pp=2", 3, 8, sequence_chunks=2, micro_batches=2, schedule="1f1b")
    assert plan.micro_batches == 4 and plan.pipeline.shares == pytest.approx(
        tuple(size * (1 + plan.pipeline.attention_share * more) for size in (1.0, 0.5) for more in (-0.5, 0.5))
    )


def test_a_saved_plan_runs_the_same(tmp_path):
    model, inputs = build(LLAMA.format(kv_heads=2), batch=1, seq=16, device="cpu")
    plan = autopar.plan(model, "pp=2", inputs, hardware="cpu-gloo", baselines=False, sequence_chunks=4)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.pipeline == plan.pipeline and str(loaded) == str(plan)
    assert "one of 4 chunks of the tokens of 1 sample" in str(plan)


def test_what_cannot_be_asked():
    model, inputs = build(LLAMA.format(kv_heads=2), batch=2, seq=16)
    plan = dict(hardware="cpu-gloo", baselines=False)
    with pytest.raises(PipelineError, match="an axis pp"):
        autopar.plan(model, "dp=2", inputs, sequence_chunks=2, **plan)
    with pytest.raises(PipelineError, match="sequence_chunks is 0"):
        autopar.plan(model, "pp=2", inputs, sequence_chunks=0, **plan)
    with pytest.raises(MicroBatchError, match="16 tokens, which 3 does not divide"):
        autopar.plan(model, "pp=2", inputs, sequence_chunks=3, **plan)
    with pytest.raises(StrategyError, match="chunks of rows need one"):
        autopar.plan(model, "pp=2", inputs, sequence_chunks=2, schedule="interleaved_1f1b", **plan)
