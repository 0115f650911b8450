"""Sizes that the mesh does not divide: right numbers, by uneven shards or by a plan that avoids the split."""

from __future__ import annotations

import pytest

from autopar.models import build
from autopar.simulate.compare import verify_model


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "text, batch, mesh, strategy",
    [
        ("gpt:hidden=48,layers=1,heads=6,vocab=64,seq=8", 2, "tp=4", "megatron"),  # 6 heads over 4
        ("gpt:hidden=16,layers=1,heads=2,vocab=50257,seq=4", 2, "tp=8", "megatron"),
        ("mlp:hidden=31,ffn=62,layers=1", 4, "tp=2", "megatron"),
        ("mlp:hidden=31,ffn=31,layers=1", 4, "tp=3", None),
        ("mlp:hidden=31,ffn=62,layers=1", 10, "dp=4", "fsdp"),  # batch 10 over 4: 3, 3, 3, 1
    ],
)
def test_uneven(text, batch, mesh, strategy):
    model, inputs = build(text, batch=batch, seq=4, device="cpu")
    report = verify_model(model, inputs, mesh, strategy=strategy)
    assert report.match, report
