"""Attention block by block is attention, forward and backward, and never holds all scores."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar import _torch
from autopar.ops import attention_blocks

from ..helpers.fake_allocations import counted, nbytes

INF = float("-inf")
FP64 = torch.float64


def reference(grad, q, k, v, mask, causal):
    """Output, log-sum-exp and gradients in fp64, from all scores at once."""
    q, k, v = (x.to(FP64).requires_grad_() for x in (q, k, v))
    times = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(times, 1).transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), INF)
    if mask is not None:
        scores = scores + mask.to(FP64)
    closed = (scores == INF).all(-1, keepdim=True)
    weights = scores.masked_fill(closed, 0.0).softmax(-1).masked_fill(closed, 0.0)
    out = weights @ v.repeat_interleave(times, 1)
    return out.detach(), scores.detach().logsumexp(-1), *torch.autograd.grad(out, (q, k, v), grad.to(FP64))


def compare(heads, kv_heads, rows, columns, width, v_width, mask, causal, dtype, block, batch=2):
    generator = torch.Generator().manual_seed(rows * 31 + columns)
    shapes = [(heads, rows, v_width), (heads, rows, width), (kv_heads, columns, width), (kv_heads, columns, v_width)]
    grad, q, k, v = (torch.randn(batch, *s, generator=generator, dtype=FP64).to(dtype) for s in shapes)
    arguments = mask, causal, width**-0.5, block
    out, lse = attention_blocks.forward(q, k, v, *arguments)
    gradients = attention_blocks.backward(grad, q, k, v, out, lse, *arguments)
    tolerance = {FP64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
    for mine, whole in zip((out, lse, *gradients), reference(grad, q, k, v, mask, causal), strict=True):
        torch.testing.assert_close(mine.to(FP64), whole, rtol=tolerance, atol=tolerance)


def mask_of(kind: str, rows: int, columns: int, heads: int) -> torch.Tensor | None:
    """A mask that is added: padding of keys that closes all of a sample's, numbers, or a window a head."""
    if kind == "padding":
        lengths = torch.tensor([columns, 0])
        return torch.zeros(2, 1, 1, columns).masked_fill(torch.arange(columns) >= lengths[:, None, None, None], INF)
    if kind == "numbers":
        return torch.randn(1, heads, rows, columns, generator=torch.Generator().manual_seed(1))
    if kind == "window":
        distance = torch.arange(rows)[:, None] - torch.arange(columns)
        return torch.zeros(rows, columns).masked_fill(distance.abs() > 3, INF)
    return None


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    st.integers(1, 20), st.integers(1, 20), st.integers(1, 9), st.integers(1, 9),
    st.sampled_from(["none", "padding", "numbers", "window"]),
    st.booleans(), st.sampled_from([FP64, torch.float32]), st.integers(1, 9),
)  # fmt: skip
def test_small_shapes(heads, rows, columns, width, v_width, kind, causal, dtype, block):
    mask = mask_of(kind, rows, columns, heads[0])
    compare(*heads, rows, columns, width, v_width, mask, causal, dtype, block)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize(
    "rows, columns, width, dtype",
    [
        (1, 100, 64, FP64),
        (100, 1, 80, torch.float32),
        (100, 100, 256, torch.bfloat16),
        (600, 600, 128, torch.float32),
    ],
)
def test_usual_shapes(heads, rows, columns, width, dtype, causal):
    compare(*heads, rows, columns, width, width, None, causal, dtype, attention_blocks.BLOCK)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_narrow_products(heads, causal, monkeypatch):
    """On GPUs weights and gradients of scores are rounded before they are multiplied, and nothing else is."""
    multiplied = []

    def widened(a, b, wide):
        multiplied.append((a.dtype, b.dtype))
        return a.to(wide) @ b.to(wide)

    monkeypatch.setattr(attention_blocks, "multiplies_narrow", lambda device: True)
    monkeypatch.setattr(attention_blocks, "widened_product", widened)
    for dtype in (torch.bfloat16, torch.float32):
        compare(*heads, 300, 300, 64, 64, None, causal, dtype, attention_blocks.BLOCK)
    assert {*multiplied} == {(torch.bfloat16, torch.bfloat16)}


def test_products_where_torch_has_narrow_ones():
    """Tensors without values run what GPUs run."""
    q, k, v = (torch.empty(2, heads, 300, 64, dtype=torch.bfloat16, device="meta") for heads in (4, 2, 2))
    with CountedProducts() as products:
        out, lse = attention_blocks.forward(q, k, v, None, True, 0.125)
        gradients = attention_blocks.backward(out, q, k, v, out, lse, None, True, 0.125)
    assert [x.dtype for x in (out, lse, *gradients)] == [torch.bfloat16, torch.float32, *[torch.bfloat16] * 3]
    assert {*products.ops} == {torch.ops.aten.bmm.dtype}


class CountedProducts(_torch.TorchDispatchMode):
    """Notes the products that run."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.mm, torch.ops.aten.baddbmm):
            self.ops.append(op)
        return op(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "padding", "window"])
def test_long_rows(kind):
    compare(2, 1, 2048, 2048, 64, 64, mask_of(kind, 2048, 2048, 2), True, FP64, attention_blocks.BLOCK)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("length", [2048, 4096])
def test_never_all_scores(length):
    """It holds some blocks of scores and of fp32 rows, and gradients in fp32, beside what goes in and out."""
    b, h, kv_heads, d = 1, 8, 2, 128

    def new(heads, width=d):
        return torch.empty(b, heads, length, width, dtype=torch.bfloat16)

    qkv = lambda: [new(h), new(kv_heads), new(kv_heads)]  # noqa: E731
    scale, block = d**-0.5, attention_blocks.BLOCK
    results, _, count = counted(lambda *x: attention_blocks.forward(*x, None, True, scale), qkv)
    block_bytes = b * h * block * (block + d) * 4
    assert count.peak_bytes - nbytes(results) <= 6 * block_bytes
    results, _, count = counted(
        lambda *x: attention_blocks.backward(*x, None, True, scale),
        lambda: [new(h), *qkv(), new(h), torch.empty(b, h, length)],
    )
    assert count.peak_bytes - nbytes(results) <= 8 * block_bytes + 2 * b * kv_heads * length * d * 4
