"""Attention on CUDA: which kernel serves a call, and what it wants to be given.

    kernel      types            serves
    cudnn       fp16, bf16       where torch prefers it: 2048 keys or more, heads up to 128, not grouped, no mask
    flash       fp16, bf16       no mask; causal with as many queries as keys; heads up to 256, grouped ones as they are
    efficient   fp16, bf16, fp32 any mask; keys of grouped heads are repeated
    blocks      all              the rest

Widths are padded to a multiple of 8. A mask gets rows of 16 bytes' alignment and is otherwise read as it is broadcast.

Tensors are those of autopar/ops/attention_forms.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._torch import attention_kernels as kernels
from .attention_blocks import BLOCKS
from .attention_forms import Form, Like, adjacent, closed_rows, contiguous, repeated, summed

Gradients = tuple[Tensor, Tensor, Tensor]  # of q, k and v
HALVES = (torch.float16, torch.bfloat16)
WIDEST_FLASH, WIDEST_CUDNN, FEWEST_KEYS_CUDNN = 256, 128, 2048
MOST_IN_GRID = 2**16 - 1  # batches, and heads
BIAS_ALIGNMENT = 16  # elements, enough for every type


def form_of(q: Like, k: Like, v: Like, mask: Like | None, causal: bool) -> Form:
    """Return the form that serves a call on these tensors."""
    (b, h, rows, width), columns = q.shape, k.shape[2]
    width = max(width, v.shape[-1])
    if not all((b, h, rows, columns)) or max(b, h) > MOST_IN_GRID or q.dtype not in (*HALVES, torch.float32):
        return BLOCKS
    if mask is not None or q.dtype not in HALVES or width > WIDEST_FLASH or (causal and rows != columns):
        return EFFICIENT
    is_long = columns >= FEWEST_KEYS_CUDNN and width <= WIDEST_CUDNN and h == k.shape[1]
    return CUDNN if is_long and kernels.prefers_cudnn() else FLASH


def _unmasked(attend: Callable) -> Callable:
    """Return the forward by a kernel that takes no mask and heads of one width."""

    def forward(q, k, v, mask, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = attend(*_padded(q, k, v), causal, scale)
        return out.narrow(-1, 0, v.shape[-1]), lse

    return forward


def _unmasked_backward(attend_backward: Callable) -> Callable:
    """Return the backward by a kernel that takes no mask and heads of one width."""

    def backward(grad, q, k, v, out, lse, mask, causal: bool, scale: float) -> Gradients:
        grad, wide_q, wide_k, wide_v, out = _padded(grad, q, k, v, out)
        return _cut(attend_backward(grad, wide_q, wide_k, wide_v, out, lse, causal, scale), (q, k, v))

    return backward


def _efficient(q, k, v, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    wide_q, wide_k, wide_v = _padded(q, repeated(k, q), repeated(v, q))
    out, lse = kernels.efficient(wide_q, wide_k, wide_v, _bias(mask, q, k), causal, scale)
    del wide_q, wide_k, wide_v  # before more is made
    out = out.narrow(-1, 0, v.shape[-1])
    if mask is None:
        return out, lse
    closed = closed_rows(mask, causal, q.shape[2], k.shape[2])
    return out.masked_fill(closed.unsqueeze(-1), 0.0), lse.masked_fill(closed, float("-inf"))


def _efficient_backward(grad, q, k, v, out, lse, mask: Tensor | None, causal: bool, scale: float) -> Gradients:
    if mask is not None:
        lse = lse.masked_fill(lse == float("-inf"), float("inf"))
    grad, wide_q, wide_k, wide_v, out = _padded(grad, q, repeated(k, q), repeated(v, q), out)
    bias = _bias(mask, q, k)
    dq, dk, dv = kernels.efficient_backward(grad, wide_q, wide_k, wide_v, out, lse, bias, causal, scale)
    del wide_q, wide_k, wide_v, bias  # before more is made
    return _cut((dq, summed(dk, k), summed(dv, v)), (q, k, v))


FLASH = Form("flash", _unmasked(kernels.flash), _unmasked_backward(kernels.flash_backward))
CUDNN = Form("cudnn", _unmasked(kernels.cudnn), _unmasked_backward(kernels.cudnn_backward))
EFFICIENT = Form("efficient", _efficient, _efficient_backward)


def _padded(*heads: Tensor) -> list[Tensor]:
    """Pad heads to one width that kernels take, adjacent elements in the last dim: zeros behind the others add nothing
    to a product."""
    width = -(-max(x.shape[-1] for x in heads) // 8) * 8
    padded = (x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1])) for x in heads)
    return [adjacent(x) for x in padded]


def _cut(gradients: Gradients, to: Gradients) -> Gradients:
    dq, dk, dv = (x.narrow(-1, 0, like.shape[-1]) for x, like in zip(gradients, to, strict=True))
    return dq, dk, dv


def _bias(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return a mask as (b, h, s, t) in the type of the queries, without a copy for what is broadcast, or is aligned."""
    if mask is None:
        return None
    columns = k.shape[2]
    mask = mask.to(q.dtype)
    mask = mask.expand(*mask.shape[:-1], columns)
    missing = -columns % BIAS_ALIGNMENT
    mask = contiguous(pad(mask, (0, missing)) if missing else mask).narrow(-1, 0, columns)
    return mask.expand(*q.shape[:3], columns)
