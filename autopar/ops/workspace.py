"""Bytes that an op allocates beside its arguments and results and frees before it returns.

    workspace_bytes(autopar.attention_bw.default, grad, q, k, v, out, lse, None, True, None)

Arguments are those of the call, with anything that has a `shape` and a `dtype` for a tensor: a fake local one, or one
without memory. Tensors count as they come from a projection: heads stored as (b, s, h, d), all else without gaps. What
the kernels of a GPU allocate themselves is in it as their source has it; the rest is what autopar's own forms do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from . import attention_workspace
from .attention_forms import Like, lse_dtype, numel
from .counter_rng import drawing_bytes
from .linear_loss import block_shape
from .vocab_loss import chunk_rows

SORTED_BYTES = 40  # a row of a grouped product: its place, the sorted places and their order, what the sort works on


def workspace_bytes(op: object, *arguments, **named) -> int:
    """Return the bytes of a canonical op on a GPU at its peak, 0 for an op that needs none worth counting."""
    count = _COUNTS.get(str(op))
    return 0 if count is None else count(*arguments, **named)


def _vocab_loss(logits: Like, target: Like, row_max: Like, offset: int) -> int:
    """Return a chunk in the wide type, and some numbers a row."""
    return _chunk(logits, row_max) + numel(target) * 32


def _vocab_loss_bw(grad_sum: Like, grad_picked: Like, logits: Like, target: Like, row_max: Like, offset: int) -> int:
    return _chunk(logits, row_max) + numel(target) * 32


def _chunk(logits: Like, row_max: Like) -> int:
    rows, columns = numel(row_max), logits.shape[-1]
    return min(rows, chunk_rows(rows, columns)) * columns * row_max.dtype.itemsize


def logits_bytes(rows: int, columns: int, hidden: int, dtype: torch.dtype, backward: bool) -> int:
    """Return the bytes of a block of logits and of what is made of it, where `rows` times a weight (columns, hidden)
    and its loss are computed in blocks (autopar/ops/linear_loss.py)."""
    high, width = block_shape(rows, columns, hidden)
    item, wide = dtype.itemsize, lse_dtype(dtype).itemsize
    inside = high * width * wide
    if backward and item < wide:
        inside = high * hidden * wide + max(inside, high * hidden * item)
    return high * width * item + inside + high * 48 + rows * 8


def _linear_loss(x: Like, weight: Like, target: Like, offset: int) -> int:
    return logits_bytes(numel(x) // x.shape[-1], weight.shape[0], x.shape[-1], x.dtype, False)


def _linear_loss_bw(grad_sum: Like, grad_picked: Like, x: Like, weight: Like, *rest) -> int:
    return logits_bytes(numel(x) // x.shape[-1], weight.shape[0], x.shape[-1], x.dtype, True)


def _embedding(weight: Like, index: Like, padding_idx: int, offset: int) -> int:
    return numel(index) * (weight.shape[1] * weight.dtype.itemsize + 24)


def _embedding_dw(grad: Like, index: Like, padding_idx: int, offset: int, rows: int) -> int:
    return numel(grad) * grad.dtype.itemsize + numel(index) * 32


def _grouped_mm(x: Like, weight: Like, group: Like, offset: int = 0) -> int:
    """Return the sorted rows, or later what they give in that order, and the sort's own numbers."""
    return max(numel(x), x.shape[0] * weight.shape[2]) * x.dtype.itemsize + numel(group) * SORTED_BYTES


def _grouped_mm_dw(x: Like, grad: Like, group: Like, groups: int, offset: int = 0) -> int:
    return (numel(x) + numel(grad)) * x.dtype.itemsize + numel(group) * SORTED_BYTES


def _dropout(x: Like, state: Like, p: float, stream: int, start: int, strides: Sequence[int], *_: int) -> int:
    return drawing_bytes(x.shape, strides, start, "cuda")


def _fp8_quantize(x: Like, *_: object) -> int:
    """Return x * scale."""
    return numel(x) * torch.promote_types(x.dtype, torch.float32).itemsize


def _fp8_linear_dx(grad: Like, _: Like, weight: Like, *__: object) -> int:
    """Return the codes that are copied into the order of the other dim."""
    return numel(weight)


def _fp8_linear_dw(grad: Like, _: Like, x: Like, *__: object) -> int:
    return numel(grad) + numel(x)


_COUNTS: dict[str, Callable[..., int]] = {
    "autopar.attention.default": attention_workspace.attention,
    "autopar.attention_bw.default": attention_workspace.attention_bw,
    "autopar.attention_bias_bw.default": attention_workspace.attention_bias_bw,
    "autopar.even_gradient.default": attention_workspace.even_gradient,
    "autopar.dropout.default": _dropout,
    "autopar.vocab_loss.default": _vocab_loss,
    "autopar.vocab_loss_bw.default": _vocab_loss_bw,
    "autopar.linear_loss.default": _linear_loss,
    "autopar.linear_loss_bw.default": _linear_loss_bw,
    "autopar.fp8_rows.default": _fp8_quantize,
    "autopar.fp8_columns.default": _fp8_quantize,
    "autopar.fp8_blocks.default": _fp8_quantize,
    "autopar.fp8_tensor.default": _fp8_quantize,
    "autopar.fp8_linear_dx.default": _fp8_linear_dx,
    "autopar.fp8_linear_dw.default": _fp8_linear_dw,
    "autopar.grouped_mm.default": _grouped_mm,
    "autopar.grouped_mm_dw.default": _grouped_mm_dw,
    "autopar.embedding.default": _embedding,
    "autopar.embedding_dw.default": _embedding_dw,
}
