"""The sums of a cross-entropy in chunks of rows: exact for any cut of the vocabulary, and small in memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ops import vocab_loss as ops

from ..helpers.fake_allocations import counted, nbytes

FORWARD, BACKWARD = ops.vocab_loss._init_fn, ops.vocab_loss_bw._init_fn  # what runs on real tensors


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.integers(0, 5), min_size=0, max_size=2),
    st.integers(2, 13), st.data(), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), st.integers(1, 40),
)  # fmt: skip
def test_shards_add_up(leading, vocabulary, data, dtype, fewest):
    """Over uneven parts of the vocabulary, in small chunks, against fp64 and torch's cross-entropy."""
    cut = data.draw(st.integers(1, vocabulary - 1))
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(*leading, vocabulary, generator=generator, dtype=torch.float64).to(dtype)
    target = torch.randint(0, vocabulary, leading, generator=generator)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    row_max = logits.amax(-1).to(wide)
    whole = ops.FEWEST_NUMEL
    try:
        ops.FEWEST_NUMEL = fewest
        parts = [(logits[..., :cut].contiguous(), 0), (logits[..., cut:].contiguous(), cut)]
        sums = [FORWARD(part, target, row_max, at) for part, at in parts]
        total, picked = (sum(s) for s in zip(*sums))
        gradient = torch.cat(
            [BACKWARD(1 / total, -torch.ones_like(picked), p, target, row_max, at) for p, at in parts], -1
        )
    finally:
        ops.FEWEST_NUMEL = whole
    assert total.shape == picked.shape == row_max.shape and total.dtype == wide and gradient.dtype == dtype
    exact = logits.double().requires_grad_()
    loss = torch.nn.functional.cross_entropy(exact.reshape(-1, vocabulary), target.reshape(-1), reduction="none")
    wanted = torch.autograd.grad(loss.sum(), exact)[0]
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    mine = (total.log() + row_max - picked).double().reshape(-1)
    torch.testing.assert_close(mine, loss.detach(), rtol=1e-5 if wide == torch.float32 else 1e-12, atol=1e-5)
    torch.testing.assert_close(gradient.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("rows, vocabulary", [((8192,), 128256), ((2, 4096), 128256 // 8), ((4, 512), 32000)])
def test_memory(rows, vocabulary, device):
    """Neither way holds more than a fifth of the gradient beside what it gives."""

    def rows_of(dtype=torch.float32):
        return torch.empty(rows, dtype=dtype, device=device)

    def logits():
        return torch.empty(*rows, vocabulary, dtype=torch.bfloat16, device=device)

    forward = counted(FORWARD, lambda: [logits(), rows_of(torch.int64), rows_of(), 0])
    backward = counted(BACKWARD, lambda: [rows_of(), rows_of(), logits(), rows_of(torch.int64), rows_of(), 0])
    gradient_bytes = nbytes(backward[0])
    assert forward[2].peak_bytes <= 0.2 * gradient_bytes
    assert gradient_bytes <= backward[2].peak_bytes <= 1.2 * gradient_bytes
