"""Attention by torch's fused CPU kernel, which takes keys and values of grouped heads as they are. Tensors are those of
autopar/ops/attention_forms.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .attention_forms import Form, adjacent, closed_rows, lse_dtype

aten = torch.ops.aten


def forward(q, k, v, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return (output, log-sum-exp)."""
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        *_one_width(q, k, v), 0.0, causal, attn_mask=_whole(mask, q, k), scale=scale
    )
    lse = lse.to(lse_dtype(q.dtype))
    if mask is not None:
        lse = lse.masked_fill(closed_rows(mask, causal, q.shape[2], k.shape[2]), float("-inf"))  # the kernel says 0
    return out[..., : v.shape[-1]], lse


def backward(grad, q, k, v, out, lse, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    if mask is not None:
        lse = lse.masked_fill(lse == float("-inf"), 0.0)  # what the kernel says itself of a closed query
    wide_q, wide_k, *wide = _one_width(q, k, v, out, grad)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        wide[2], wide_q, wide_k, *wide[:2], lse, 0.0, causal, attn_mask=_whole(mask, q, k), scale=scale
    )
    return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]]


CPU = Form("cpu", forward, backward)


def _one_width(*heads: Tensor) -> list[Tensor]:
    """Pad heads to one size, as the kernel wants them: zeros behind the others add nothing to a product."""
    width = max(x.shape[-1] for x in heads)
    return [
        adjacent(x) if x.shape[-1] == width else torch.nn.functional.pad(x, (0, width - x.shape[-1])) for x in heads
    ]


def _whole(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    return None if mask is None else mask.expand(*q.shape[:3], k.shape[2])
