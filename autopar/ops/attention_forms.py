"""How attention is computed: by torch's fused CPU kernel, or written out in products and a softmax.

A query that the mask closes to every key (the padding of a batch that is padded on the left, under a causal mask) has
the output 0, the log-sum-exp -inf and gives no gradient, in both forms, as torch's own attention has it. A mask of the
lowest finite number closes nothing: such a query attends to all keys alike. The kernel then loses its log-sum-exp in
rounding and gives a gradient as many times too large as there are keys, as it does in eager torch; the form written out
gives the gradient of what it computes.

Tensors: q, out and grad (b, h, s, d), k and v (b, h, t, d), additive mask, broadcastable to (b, h, s, t), lse (b, h,
s). Both forms run on the tensors of any device that has their ops.
"""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten


def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a mask that says what to keep as one that is added to the scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of the log-sum-exp of queries of type `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# torch's CPU kernel ----------------------------------------------------------------------------------


def by_kernel(q, k, v, mask: Tensor | None, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return (output, log-sum-exp), by torch's fused CPU kernel."""
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        *_one_width(q, k, v), 0.0, causal, attn_mask=_whole(mask, q, k), scale=_scale(q, scale)
    )
    lse = lse.to(lse_dtype(q.dtype))
    if mask is not None:
        lse = lse.masked_fill(_closed(mask, causal, q.shape[2], k.shape[2]), float("-inf"))  # the kernel says 0
    return out[..., : v.shape[-1]], lse


def by_kernel_backward(
    grad, q, k, v, out, lse, mask: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v, by torch's fused CPU kernel."""
    if mask is not None:
        lse = lse.masked_fill(lse == float("-inf"), 0.0)  # what the kernel says itself of a closed query
    wide_q, wide_k, *wide = _one_width(q, k, v, out, grad)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        wide[2], wide_q, wide_k, *wide[:2], lse, 0.0, causal, attn_mask=_whole(mask, q, k), scale=_scale(q, scale)
    )
    return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]]


def _one_width(*heads: Tensor) -> list[Tensor]:
    """Pad heads to one size, as the kernel wants them: zeros behind the others add nothing to a product."""
    width = max(x.shape[-1] for x in heads)
    return [x if x.shape[-1] == width else torch.nn.functional.pad(x, (0, width - x.shape[-1])) for x in heads]


def _whole(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    return None if mask is None else mask.expand(*q.shape[:3], k.shape[2])


def _closed(mask: Tensor, causal: bool, rows: int, columns: int) -> Tensor:
    """Return whether each query may attend to no key, broadcastable to (b, h, s)."""
    closed = mask == float("-inf")
    if causal:
        closed = closed | ~_triangle(rows, columns, mask.device)
    return closed.all(-1)


# written out -----------------------------------------------------------------------------------------


def by_formula(q, k, v, mask: Tensor | None, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return (output, log-sum-exp), written out: right for every shape; fused kernels are a later choice of the code
    generator."""
    scores = _scores(q, k, mask, causal, scale)
    return _weights(scores, mask).to(q.dtype) @ v, scores.logsumexp(-1)


def by_formula_backward(grad, q, k, v, mask: Tensor | None, causal: bool, scale: float | None) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v, written out."""
    p = _weights(_scores(q, k, mask, causal, scale), mask)
    dp = (grad @ v.transpose(-1, -2)).to(p.dtype)
    ds = (p * (dp - (dp * p).sum(-1, keepdim=True))).to(q.dtype) * _scale(q, scale)
    return ds @ k, ds.transpose(-1, -2) @ q, p.to(q.dtype).transpose(-1, -2) @ grad


def _scores(q, k, mask, causal, scale) -> Tensor:
    """Return q k^T * scale + mask (b, h, s, t), in the type of the log-sum-exp, whose range the lowest number of a
    narrower type does not leave."""
    scores = (q @ k.transpose(-1, -2)).to(lse_dtype(q.dtype)) * _scale(q, scale)
    if causal:
        scores = scores.masked_fill(~_triangle(*scores.shape[-2:], scores.device), float("-inf"))
    return scores if mask is None else scores + mask


def _weights(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Return the softmax of the scores, zeros where a mask closes all of them."""
    return scores.softmax(-1) if mask is None else aten._safe_softmax(scores, -1)


def _triangle(rows: int, columns: int, device: torch.device) -> Tensor:
    return torch.ones(rows, columns, dtype=torch.bool, device=device).tril()


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale
