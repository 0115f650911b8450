"""Gradients through outputs in other types than fp32: of a model that computes in bf16, and under autocast."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import autopar

from . import tiny
from .parity import assert_close, full, pair
from .test_gradients_of_outputs import TwoHeads, batch, scores


@pytest.mark.slow
def test_mixed_precision(alone):
    """Outputs in the type that the model computes in take gradients of that type."""
    model, tokens = tiny.gpt2(n_layer=1)
    parallel, reference = pair(model, alone, tokens, precision="bf16")
    for _ in range(2):
        for m in (parallel, reference):
            out = m(**tokens)
            (out.loss + full(out.logits).float().square().mean()).backward()
    for name, parameter in reference.named_parameters():
        mine = full(dict(parallel.named_parameters())[name].grad)
        assert mine.dtype == torch.float32
        assert F.cosine_similarity(mine.flatten(), parameter.grad.flatten(), dim=0) > 0.99, name


def test_autocast_of_the_forward(alone):
    """The program that the backward makes computes under the autocast that was on in the forward, not under the
    backward's."""
    x, y = batch()
    found = []
    for first in (scores, lambda o: o["loss"]):
        with torch.autocast("cpu", torch.bfloat16):
            parallel = autopar.compile(TwoHeads(grows=False), alone, (x, y))
            first(parallel(x, y)).backward()  # inside, and outside
            outputs = parallel(x, y)
        parallel.zero_grad()
        scores(outputs).backward()
        found.append([full(p.grad) for p in parallel.parameters() if p.grad is not None])
    for mine, whole in zip(*found, strict=True):
        assert_close(mine, whole)
