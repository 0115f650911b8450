"""Outputs of blocks of keys join to attention over all keys, also where a lowest number closes all keys of a query."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from autopar.ops import autopar
from autopar.ops.attention_blocks import BLOCKS
from autopar.ops.attention_forms import lse_dtype

SHAPES = [(2, 4, 6, 9), (1, 4, 6, 9), (2, 1, 6, 9), (2, 1, 1, 9), (6, 9), (1, 1, 6, 1)]
DTYPES = {torch.float64: 1e-12, torch.float32: 1e-5}


def mask_of(shape: tuple[int, ...], dtype: torch.dtype, rng: random.Random) -> torch.Tensor:
    """Return numbers that are added to scores; some keys are closed by the lowest one or by -inf, and all of some
    queries by either."""
    generator = torch.Generator().manual_seed(rng.randrange(10**6))
    mask = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    for closed in (torch.finfo(dtype).min, float("-inf")):
        mask = mask.masked_fill(torch.rand(shape, generator=generator) < 0.3, closed)
        rows = torch.rand((*shape[:-1], 1), generator=generator) < 0.2
        mask = torch.where(rows, torch.tensor(closed, dtype=dtype), mask)
    return mask


def random_call(shape, dtype):
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    q, (k, v) = torch.randn(2, 4, 6, 8, dtype=dtype), (torch.randn(2, 2, 9, 8, dtype=dtype) for _ in range(2))
    ends = sorted(rng.sample(range(1, 9), 2))
    return q, k, v, mask_of(shape, dtype, rng), list(itertools.pairwise([0, *ends, 9]))


def of_keys(mask: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return mask if mask.shape[-1] == 1 else mask[..., start:stop]


@pytest.mark.parametrize("shape, dtype", itertools.product(SHAPES, DTYPES))
def test_blocks_join(shape, dtype):
    """Against a softmax over all scores, which are lost in a lowest number."""
    q, k, v, mask, blocks = random_call(shape, dtype)
    joined, highest = None, mask.amax(-1, keepdim=True)
    for start, stop in blocks:
        block = of_keys(mask, start, stop)
        out, lse = autopar.attention(q, k[:, :, start:stop], v[:, :, start:stop], block, False, None)
        lse = autopar.block_lse(lse, highest, block, stop - start)
        joined = (out, lse) if joined is None else autopar.join_attention(*joined, out, lse, stop == 9)
    scores = q @ k.repeat_interleave(2, 1).mT * 8**-0.5 + mask
    expected = torch.softmax(scores, -1).nan_to_num(0.0) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(joined[0], expected, rtol=0, atol=DTYPES[dtype])
    whole = autopar.attention(q, k, v, mask, False, None)[1]
    torch.testing.assert_close(autopar.whole_lse(joined[1], highest), whole, rtol=DTYPES[dtype], atol=DTYPES[dtype])


@pytest.mark.parametrize("shape, dtype", itertools.product(SHAPES, DTYPES))
def test_gradients_of_blocks_add_up(shape, dtype):
    """Gradients by a block of keys, from output and log-sum-exp of all keys, are those by all keys; of queries that a
    lowest number closes the kernel gives a gradient as many times too large, on blocks as on the whole."""
    q, k, v, mask, blocks = random_call(shape, dtype)
    grad = torch.randn(2, 4, 6, 8, dtype=dtype)
    out, lse = autopar.attention(q, k, v, mask, False, None)
    dq, dk, dv = autopar.attention_bw(grad, q, k, v, out, lse, mask, False, None)
    found = [
        autopar.attention_bw(grad, q, k[:, :, a:b], v[:, :, a:b], out, lse, of_keys(mask, a, b), False, None,
                             of_block=True)
        for a, b in blocks
    ]  # fmt: skip
    tolerance = 10 * DTYPES[dtype] * max(x.abs().max().item() for x in (dq, dk, dv))
    torch.testing.assert_close(sum(f[0] for f in found), dq, rtol=0, atol=tolerance)
    for i, whole in ((1, dk), (2, dv)):
        torch.testing.assert_close(torch.cat([f[i] for f in found], 2), whole, rtol=0, atol=tolerance)


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_of_the_written_form(shape):
    """The form without a kernel reads the log-sum-exp of all keys where it is told that these are some of them."""
    q, k, v, mask, blocks = random_call(shape, torch.float64)
    mask = mask.masked_fill(mask == torch.finfo(torch.float64).min, float("-inf"))
    out, lse = BLOCKS.forward(q, k, v, mask, False, 0.3)
    grad = torch.randn_like(out)
    dq, *_ = BLOCKS.backward(grad, q, k, v, out, lse, mask, False, 0.3)
    found = [
        BLOCKS.backward(grad, q, k[:, :, a:b], v[:, :, a:b], out, lse, of_keys(mask, a, b), False, 0.3,
                        lse_is_exact=True)[0]
        for a, b in blocks
    ]  # fmt: skip
    torch.testing.assert_close(sum(found), dq, rtol=0, atol=1e-12)
    assert lse.dtype == lse_dtype(q.dtype)
