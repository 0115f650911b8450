"""reduce_dtype="bf16": what a plan predicts of gradients that are added up in a narrow type, in bytes and seconds."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from autopar import compiler
from autopar.api import entry as api
from autopar.errors import StrategyError
from autopar.models import registry
from autopar.simulate.compare import verify_model
from tests.helpers import kept

from ..runtime import tiny
from .planning import make, toy
from .test_bytes import emitted, predicted

MLP = "mlp:hidden=16,layers=2"
LLAMA = "llama:hidden=32,layers=2,heads=4,kv_heads=2,ffn=48,vocab=96"
LINK, MEMORY = 1e9, 4e10
MACHINE = toy(link=LINK, memory=MEMORY)


@functools.cache
def graph_of(model: str, precision: str = "fp32"):
    return compiler.trace(*registry.build(model, batch=8, seq=16, device="meta"), precision=precision)


def test_bytes_and_seconds_of_an_all_reduce():
    """A ring all-reduce sends 2 (n - 1) / n of what a device holds; a cast reads four bytes and writes two, or the
    other way round."""
    graph, n = graph_of(MLP), 4
    wide, narrow = (
        make(graph, f"dp={n}", MACHINE, strategy="ddp", reduce_dtype=dtype).collectives for dtype in (None, "bf16")
    )
    elements = sum(p.numel() for p in registry.build(MLP, batch=8, seq=16, device="meta")[0].parameters())
    sums = [next(c for c in found if c.phase == "backward") for found in (wide, narrow)]
    share = 2 * (n - 1) / n * elements
    assert [c.kind for c in sums] == ["all_reduce"] * 2 and sums[0].count == sums[1].count
    assert [c.wire_bytes for c in sums] == pytest.approx([4 * share, 2 * share])
    assert sums[0].seconds == pytest.approx(4 * share / LINK)
    assert sums[1].seconds == pytest.approx(2 * share / LINK + 12 * elements / MEMORY)


def test_a_gradient_that_is_made_narrow_is_cast_once():
    """precision="bf16": the cast to float32 that goes in front of a wide reduction comes behind a narrow one."""
    plan = make(graph_of(MLP, "bf16"), "dp=4", MACHINE, strategy="ddp", precision="bf16", reduce_dtype="bf16")
    (found,) = [c for c in plan.collectives if c.phase == "backward"]
    elements = sum(p.numel() for p in registry.build(MLP, batch=8, seq=16, device="meta")[0].parameters())
    assert found.wire_bytes == pytest.approx(3 * elements)
    assert 3 * elements / LINK + 6 * elements / MEMORY <= found.seconds < 3 * elements / LINK + 12 * elements / MEMORY


@pytest.mark.sampled(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("mesh", "strategy"), [("dp=4", "ddp"), ("dp=4", "fsdp"), ("dp=4", "zero1"), ("dp=2,tp=2", "megatron_sp")]
)
def test_predicted_is_emitted(mesh, strategy, precision):
    graph = graph_of(LLAMA, precision)
    plans = [make(graph, mesh, MACHINE, strategy=strategy, precision=precision, reduce_dtype=d) for d in (None, "bf16")]
    said, sent = [predicted(p) for p in plans], [emitted(graph, p, 0) for p in plans]
    for a, b in zip(said, sent):
        assert {k: round(v) for k, v in a.items()} == {k: round(v) for k, v in b.items()}
    assert said[1].total() < said[0].total() and plans[1].step_seconds < plans[0].step_seconds


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [dict(solver="ilp"), {}])
def test_the_search_pays_what_the_plan_says(options):
    model, inputs = tiny.own(LLAMA.replace("layers=2", "layers=1"))
    options = options | dict(reduce_dtype="bf16", hardware="cpu-gloo", baselines=False, cache=kept.captures())
    planned = api.search(model, "dp=4", inputs, **options)
    assert math.isclose(planned.plan.step_seconds, planned.evaluation.seconds) and planned.plan.gap < 0.01


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "mesh, options",
    [
        ("dp=2", dict(strategy="ddp")), ("dp=4", dict(strategy="fsdp")), ("dp=2,tp=2", dict(strategy="megatron_sp")),
        ("dp=2", dict(strategy="ddp", precision="bf16")), ("dp=2", dict(strategy="ddp", precision="fp16")),
        ("dp=2", dict(micro_batches=2, strategy="zero1")),
        ("pp=2,dp=2", dict(micro_batches=2, strategy="ddp")),
    ],
)  # fmt: skip
def test_a_simulated_step_is_that_of_one_device_but_for_rounding(mesh, options, dtype):
    model, inputs = tiny.own(LLAMA)
    report = verify_model(model, inputs, mesh, reduce_dtype=dtype, **options)
    assert report.match and report.wide.match, str(report)
    assert 1e-6 < max(report.gradient_errors.values()) < 3e-2
    if report.plan.mesh.names == ("dp",):
        assert report.sent_bytes == pytest.approx((report.predicted_bytes,) * len(report.sent_bytes))


def test_names():
    model, inputs = tiny.own("mlp:hidden=16,layers=1")
    call = dict(mesh="dp=2", example_inputs=inputs, baselines=False)
    plans = [kept.plan(model, reduce_dtype=d, **call) for d in (None, torch.bfloat16, "bfloat16", "fp16")]
    assert [p.reduce_dtype for p in plans] == [None, "bf16", "bf16", "fp16"]
    assert [f"gradients reduced in {p.reduce_dtype}, " in str(p) for p in plans] == [False, True, True, True]
    for wrong in ("fp32", torch.float32, "fp8"):
        with pytest.raises(StrategyError, match="fp8|cannot be reduced in(.|\n)*use bf16 or fp16"):
            kept.plan(model, reduce_dtype=wrong, **call)
