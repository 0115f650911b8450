"""The forms that a compiler fuses compute what the canonical ops compute."""

from __future__ import annotations

import pytest
import torch

from autopar.ops import autopar, fused_forms
from autopar.ops.counter_rng import contiguous_strides, of_micro_batch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape, start, strides", [((4, 8), 0, None), ((3, 5, 2), 7, (40, 4, 1)), ((6,), 4, (3,))])
def test_dropout(shape, start, strides, dtype):
    x, strides = torch.randn(shape).to(dtype), strides or contiguous_strides(shape)
    for seed, p in ((3, 0.1), (2**63 - 5, 0.5), (-9, 0.0), (1, 1.0)):
        state = torch.tensor([seed, 2])
        for given in ((state, p, 11, start, strides), (of_micro_batch(state, 3), p, 11, start, strides, 64)):
            assert torch.equal(fused_forms.dropout(x, *given), autopar.dropout(x, *given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0, 5])
def test_vocab_loss(dtype, offset):
    logits, target = torch.randn(2, 3, 7).to(dtype), torch.tensor([[0, 5, 11], [6, -100, 7]])
    top = logits.amax(-1).float()
    wanted = autopar.vocab_loss(logits, target, top, offset)
    for got, one in zip(fused_forms.vocab_loss(logits, target, top, offset), wanted):
        torch.testing.assert_close(got, one)
    grads = torch.randn(2, 3), torch.randn(2, 3)
    got = fused_forms.vocab_loss_bw(*grads, logits, target, top, offset)
    torch.testing.assert_close(got, autopar.vocab_loss_bw(*grads, logits, target, top, offset))
