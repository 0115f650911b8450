"""Attention of ranges of the queries is the whole attention, in every form: outputs side by side, gradients summed."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ops import attention, attention_blocks, attention_rows, autopar, workspace
from autopar.ops import attention_cpu as cpu
from autopar.ops.attention_forms import additive

from ..helpers.fake_allocations import counted, nbytes
from .test_attention_gpu import BF16, FP32, seq_major

FP64 = torch.float64


def as_op(grad, q, k, v, mask, causal, first, whole):
    out, lse = autopar.attention(q, k, v, mask, causal, None, first)
    return out, lse, *autopar.attention_bw(grad, q, k, v, *whole, mask, causal, None, first)


def kernel(grad, q, k, v, mask, causal, first, whole):
    """The CPU's kernel for the rectangle and for the triangle."""
    arguments, form_of = (additive(mask, FP64), causal, q.shape[-1] ** -0.5, first), lambda *_: cpu.CPU
    out, lse = attention_rows.forward(form_of, q, k, v, *arguments)
    return out, lse, *attention_rows.backward(form_of, grad, q, k, v, *whole, *arguments)


def blocks(grad, q, k, v, mask, causal, first, whole):
    arguments = additive(mask, FP64), causal, q.shape[-1] ** -0.5, 3, first
    out, lse = attention_blocks.forward(q, k, v, *arguments)
    return out, lse, *attention_blocks.backward(grad, q, k, v, *whole, *arguments)


def mask_of(kind: str, rows: int, columns: int) -> torch.Tensor | None:
    """A mask that says what to keep: keys of the second sample padded on one side, or a window."""
    places = torch.arange(columns)
    if kind == "window":
        return (torch.arange(rows)[:, None] - places).abs() < 3
    if kind == "none":
        return None
    padding = torch.tensor([0, min(3, columns)])[:, None]
    return (places >= padding if kind == "left" else places < columns - padding)[:, None, None, :]


@pytest.mark.parametrize("form", [as_op, kernel, blocks])
@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([(4, 4), (4, 2), (6, 1)]), st.integers(2, 12), st.integers(1, 12), st.booleans(),
    st.sampled_from(["none", "left", "right", "window"]), st.sets(st.integers(1, 11), max_size=3),
)  # fmt: skip
def test_ranges_together_are_the_whole(form, heads, rows, columns, causal, kind, cuts):
    generator = torch.Generator().manual_seed(rows * 31 + columns)
    shapes = [(heads[0], rows), (heads[0], rows), (heads[1], columns), (heads[1], columns)]
    grad, q, k, v = (torch.randn(2, h, n, 4, generator=generator, dtype=FP64) for h, n in shapes)
    mask = mask_of(kind, rows, columns)
    out, lse = autopar.attention(q, k, v, mask, causal, None)
    wanted = out, lse, *autopar.attention_bw(grad, q, k, v, out, lse, mask, causal, None)
    found = []
    for start, stop in itertools.pairwise([0, *sorted(c for c in cuts if c < rows), rows]):
        own = [x[:, :, start:stop] for x in (grad, q, out, lse)]
        rows_mask = mask[start:stop] if kind == "window" else mask
        found.append(form(own[0], own[1], k, v, rows_mask, causal, start, (own[2], own[3])))
    outs, lses, dqs, dks, dvs = zip(*found)
    together = torch.cat(outs, 2), torch.cat(lses, 2), torch.cat(dqs, 2), sum(dks), sum(dvs)
    for mine, whole in zip(together, wanted, strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype, kv_heads, columns, kernel", [
    (BF16, 4, 128, "flash"), (BF16, 1, 128, "flash"), (FP32, 4, 128, "efficient"), (BF16, 4, 100, "efficient"),
    (BF16, 4, 50, "flash"),
])  # fmt: skip
def test_kernels_of_a_gpu(dtype, kv_heads, columns, kernel):
    """A rectangle and a triangle, one of them where all keys come before the queries; never the blocks."""
    first, lse = 64, torch.empty(2, 4, 64, device="meta")
    q, *kv = (seq_major(2, h, n, 64, dtype, "meta") for h, n in ((4, 64), (kv_heads, columns), (kv_heads, columns)))

    def cuda(*values):
        return lambda: [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") for x in values]

    tail = None, True, None, first
    for body, op, values in (
        (attention.attention, autopar.attention, (q, *kv)),
        (attention.attention_bw, autopar.attention_bw, (q, q, *kv, q, lse)),
    ):
        results, arguments, count = counted(lambda *x, body=body: body._init_fn(*x, *tail), cuda(*values))
        names = [name for name in count.ops if "attention" in name]
        assert len(names) == 1 + (columns > first) and kernel in names[-1]
        said = workspace.workspace_bytes(op.default, *arguments, *tail)
        assert count.peak_bytes - nbytes(results) <= said + 64 * 1024
