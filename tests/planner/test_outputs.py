"""Outputs of all micro-batches in a plan's memory: kept where there is room, else made again when they are read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.errors import MemoryInfeasibleError
from autopar.models.output import Output
from tests.helpers import kept

ROWS, WORDS, MANY = 8, 4000, 4


class Words(nn.Module):
    """A model whose logits are most of its memory; `norm` keeps running statistics."""

    def __init__(self, has_norm: bool = False):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.norm = nn.BatchNorm1d(16) if has_norm else nn.Identity()
        self.head = nn.Linear(16, WORDS)

    def forward(self, x, labels):
        logits = self.head(self.body(self.norm(x)))
        return Output(F.cross_entropy(logits, labels), logits)


def plan(mesh: str, memory: float | None = None, has_norm: bool = False, **options) -> autopar.Plan:
    batch = dict(x=torch.randn(ROWS * MANY, 16), labels=torch.zeros(ROWS * MANY, dtype=torch.long))
    options = dict(micro_batches=MANY, baselines=False, tile="none") | options
    return kept.plan(Words(has_norm), mesh, batch, hardware="cpu-gloo", memory=memory, **options)


@pytest.mark.parametrize("mesh, ways", [("dp=2", 2), ("pp=2", 1), ("pp=2,dp=2", 2)])
def test_what_does_not_fit_is_not_kept(mesh, ways, tmp_path):
    strategy = (
        {"strategy": "ddp"} if ways > 1 else {}
    )  # else logits are cut in the words, and no bytes follow from ways
    kept = plan(mesh, **strategy)
    held = ROWS * MANY * WORDS * 4 / ways
    assert not kept.unmade_bytes and "reading one runs the forwards again" not in str(kept)
    short = plan(mesh, kept.peak_bytes - held / 2, **strategy)
    assert short.unmade_bytes == held and short.step_seconds == kept.step_seconds and not short.recomputed
    assert short.peak_bytes == pytest.approx(kept.peak_bytes - held)
    assert "reading one runs the forwards again" in str(short)
    short.save(tmp_path / "plan.json")
    assert autopar.Plan.load(tmp_path / "plan.json") == replace(short, planning_seconds=0.0)


def test_outputs_of_one_micro_batch_are_counted_where_they_are_made():
    assert not plan("dp=2", 3e6, micro_batches=1, strategy="ddp").unmade_bytes


def test_what_writes_to_buffers_keeps_its_outputs():
    kept = plan("pp=2", has_norm=True)
    with pytest.raises(MemoryInfeasibleError):
        plan("pp=2", kept.peak_bytes - ROWS * MANY * WORDS * 2, has_norm=True)
    flat = plan("dp=2", has_norm=True, strategy="ddp")
    short = plan("dp=2", flat.peak_bytes - ROWS * MANY * WORDS, has_norm=True, strategy="ddp")
    assert short.peak_bytes == flat.peak_bytes and not flat.warnings
    assert "outputs of all micro-batches take" in short.warnings[-1]
