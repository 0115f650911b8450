"""Stages send inside of themselves as many bytes as the plan says, also of a parameter that several of them have."""

from __future__ import annotations

import pytest

import autopar
from autopar import models

TIED = "gpt:hidden=32,layers=2,heads=4,vocab=96,seq=16"
APART = "llama:hidden=32,layers=2,heads=4,kv_heads=2,ffn=64,vocab=96"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", [None, "ddp", "zero1", "fsdp"])
@pytest.mark.parametrize("text, mesh", [(TIED, "pp=2,dp=2"), (TIED, "pp=4,dp=2"), (APART, "pp=2,dp=2")])
def test_bytes_are_those_of_the_plan(text, mesh, strategy):
    model, inputs = models.build(text, batch=8, seq=16, device="cpu", seed=0)
    report = autopar.verify(model, mesh, inputs, strategy=strategy, schedule="1f1b", micro_batches=4, precision="fp32")
    assert report.match
    assert report.sent_bytes == pytest.approx([report.predicted_bytes] * len(report.sent_bytes))
    assert report.predicted_bytes or strategy is None  # which may keep all whole
