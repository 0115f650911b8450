"""Configurations that others chose: FLOPs by Megatron's formula, forced levels, and no refusal for memory."""

from __future__ import annotations

import json

import pytest

import autopar
from autopar import models
from autopar.cli.main import main
from autopar.errors import StrategyError
from tests.helpers import kept
from tests.planner.planning import toy

BATCH, SEQ, LAYERS, HIDDEN, VOCAB = 8, 64, 1, 64, 256
GPT = f"gpt:hidden={HIDDEN},layers={LAYERS},heads=4,vocab={VOCAB},seq={SEQ}"


def estimated(model: str = GPT, mesh: str = "dp=2,tp=2", batch: int = BATCH, **options) -> autopar.Estimate:
    return autopar.estimate(
        *_ordered(models.build(model, batch=batch, seq=SEQ), mesh), cache=kept.captures(), **options
    )


def _ordered(built, mesh):
    model, inputs = built
    return model, mesh, inputs


def test_flops_are_those_of_the_paper():
    passes = 3
    call = dict(strategy="megatron", precision="fp32")
    e = estimated(recompute="full", micro_batches=passes, batch=passes * BATCH, **call)
    common = passes * BATCH * SEQ * LAYERS * HIDDEN**2
    model = 72 * common * (1 + SEQ / (6 * HIDDEN) + VOCAB / (12 * LAYERS * HIDDEN))
    whole = 96 * common * (1 + SEQ / (6 * HIDDEN) + VOCAB / (16 * LAYERS * HIDDEN))
    hardware = whole - 8 * common  # the last product of a block is not made again
    assert (e.model_flops, e.hardware_flops) == pytest.approx((model, hardware))
    assert estimated(recompute="none", **call).hardware_flops == pytest.approx(model / passes)
    assert e.dtype == "fp32" and e.utilization == pytest.approx(model / (4 * e.plan.step_seconds) / e.peaks["fp32"])
    rate = e.tflops_per_device(e.model_flops, e.plan.step_seconds)
    assert rate == pytest.approx(model / (4 * e.plan.step_seconds) / 1e12)


# a machine on which only products take time
COMPUTES = toy(flops=1e9, memory=1e18, link=1e18)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule, stages", [("1f1b", 1), ("interleaved_1f1b", 2)])
def test_a_pipeline_has_the_flops_and_the_bubble_of_the_paper(schedule, stages):
    """Section 2.2 of the same: idle over ideal time is (p - 1) / (v m), here over the whole step; all but the head is
    even."""
    ranks, many, layers, hidden, batch, vocab = 2, 4, 4, 64, 16, 8
    e = estimated(
        f"gpt:hidden={hidden},layers={layers},heads=4,vocab={vocab},seq={SEQ}", f"pp={ranks},tp=2", batch,
        schedule=schedule, stages_per_rank=stages, micro_batches=many, strategy="megatron", recompute="full",
        hardware=COMPUTES,
    )  # fmt: skip
    common = batch * SEQ * layers * hidden**2
    assert e.model_flops == pytest.approx(72 * common * (1 + SEQ / (6 * hidden) + vocab / (12 * layers * hidden)))
    assert e.hardware_flops == pytest.approx(
        96 * common * (1 + SEQ / (6 * hidden) + vocab / (16 * layers * hidden)) - 8 * common
    )
    pipeline, each = e.plan.pipeline, layers // (ranks * stages) * (12 * hidden**2 + 13 * hidden)
    outside = [(vocab + SEQ) * hidden, *[0] * (ranks * stages - 2), (vocab + 2) * hidden]  # the head is the embedding
    assert [cost.parameters for cost in pipeline.costs] == [each + more for more in outside]
    assert pipeline.played().bubble == pytest.approx((ranks - 1) / (stages * many + ranks - 1), rel=0.03)
    if stages == 1:
        seconds = [c.forward_seconds + c.input_seconds + c.weight_seconds for c in pipeline.costs]
        assert pipeline.played().seconds == pytest.approx(sum(seconds) + (many - 1) * max(seconds))
    computed = (
        24 * common / many * (1 + SEQ / (12 * hidden) + vocab / (12 * layers * hidden))
    )  # half of the scores are masked
    assert sum(c.forward_seconds for c in pipeline.costs) * 2 * 1e9 == pytest.approx(computed, rel=1e-3)


def test_memory_is_never_refused():
    for recompute in ("auto", "none", "full"):
        e = estimated("mlp:hidden=64,layers=2", mesh="dp=2", strategy="ddp", recompute=recompute, memory="100KiB")
        assert not e.fits and e.missing_bytes == e.plan.peak_bytes - 100 * 1024
        assert "does not fit" in str(e)
    assert estimated(strategy="ddp").missing_bytes == 0.0


def test_zero_beside_tensor_parallelism():
    plain, one, three = (estimated(strategy=s).plan for s in ("megatron_sp", "megatron_sp+zero1", "megatron_sp+fsdp"))
    for sharded in (one, three):
        assert sharded.memory["optimizer"] == pytest.approx(plain.memory["optimizer"] / 2, rel=0.05)
    waiting = estimated(strategy="megatron_sp+zero1", micro_batches=2).plan
    assert waiting.memory["gradients"] == pytest.approx(plain.memory["gradients"], rel=0.06)  # vectors are whole here
    assert three.memory["gradients"] == pytest.approx(plain.memory["gradients"] / 2, rel=0.05)
    for wrong in ("megatron+megatron", "ddp+zero1", "megatron+hsdp", "megatron+zero1+zero1", "megatron+"):
        with pytest.raises(StrategyError, match="fix: "):
            estimated(strategy=wrong)


@pytest.mark.slow
@pytest.mark.parametrize("model", [
    "mlp:hidden=64,layers=2", "llama:hidden=64,layers=2,heads=4,vocab=256",
    "vit:hidden=64,layers=2,heads=4,image=32,patch=8",
    "moe:hidden=64,layers=1,heads=4,kv_heads=2,ffn=64,vocab=256,experts=4,active=2",
    "resnet:depth=10,width=8,image=16,classes=10",
])  # fmt: skip
def test_every_builder(model):
    passes = 1 if model.startswith("resnet") else 2  # its norm is over the whole batch
    e = estimated(model, strategy="ddp", mesh="dp=2", micro_batches=passes)
    assert e.plan.micro_batches == passes and e.model_flops > 0 and e.plan.step_seconds > 0


def test_the_command(capsys):
    words = [
        "estimate",
        "--model",
        GPT,
        "--mesh",
        "dp=2,tp=2",
        "--batch",
        "16",
        "--seq",
        str(SEQ),
        "--strategy",
        "megatron_sp",
    ]
    assert main([*words, "--zero", "1", "--micro-batch", "2", "--recompute", "selective", "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["micro_batches"], data["samples"], data["strategy"]) == (4, 16, "megatron_sp+zero1")
    assert data["peak_bytes"] == pytest.approx(sum(data["memory"].values()))
    assert data["step_seconds"] > 0 and data["tflops_per_device"] > 0
    assert main([*words, "--micro-batches", "2"]) == 0
    assert "2 micro-batches of 8 samples, gradients reduced once a step" in capsys.readouterr().out
    assert main([*words, "--micro-batch", "3"]) == 2
    assert "a micro-batch of 2 or 4" in capsys.readouterr().err


@pytest.mark.slow
def test_flops_of_uneven_micro_batches_are_those_of_the_batch():
    model, inputs = models.build("gpt:hidden=32,layers=4,heads=4,vocab=64,seq=16", batch=10, seq=16)
    flat = autopar.estimate(model, "dp=2", inputs, hardware="h100", baselines=False)
    staged = autopar.estimate(model, "pp=2", inputs, hardware="h100", micro_batches=4, baselines=False)
    assert staged.model_flops == pytest.approx(flat.model_flops, rel=1e-6)
