"""Distillation on several processes: a loss of the script's own, of the model's logits, beside the model's loss."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import gloo

from . import tiny
from .parity import device_mesh, full, pair, planned


def _train(model, teacher, tokens, steps: int) -> list[float]:
    """Distillation with a z-loss beside the model's own loss."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(steps):
        out = model(**tokens)
        logits = full(out.logits)
        soft = F.kl_div(logits.log_softmax(-1), teacher, log_target=True, reduction="batchmean")
        loss = out.loss + 0.5 * soft + 1e-3 * logits.logsumexp(-1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _distilled(rank, mesh, plan, seq):
    model, tokens = tiny.gpt2(batch=4, seq=seq, n_layer=1)
    teacher = torch.randn(4, seq, 96, generator=torch.Generator().manual_seed(2)).log_softmax(-1)
    parallel, reference = pair(model, device_mesh(mesh), tokens, plan=plan)
    mine, whole = _train(parallel, teacher, tokens, 3), _train(reference, teacher, tokens, 3)
    assert mine == pytest.approx(whole, rel=2e-4), (mine, whole)
    return mine


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize(
    "mesh, strategy", [("dp=2", "fsdp"), ("dp=2,tp=2", "megatron"), ("dp=2,tp=2", "fsdp"), ("tp=2", None)]
)
def test_distillation(mesh, strategy):
    model, tokens = tiny.gpt2(batch=4, seq=11, n_layer=1)
    plan = planned(model, mesh, tokens, strategy=strategy)
    results = gloo.run(2 if "," not in mesh else 4, _distilled, mesh, plan, 11)
    assert all(r == results[0] for r in results)
