"""torch's fused attention kernels for CUDA, which have no public interface that gives the log-sum-exp or takes it.

q, out and grad are (b, h, s, d), k and v (b, h_kv, t, d), with one d that is a multiple of 8; the log-sum-exp is
(b, h, s) in fp32. None of them drops anything, so the random state that they ask for is never read.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

aten = torch.ops.aten
LSE_ROWS = 32  # to a multiple of which the memory-efficient kernel pads its log-sum-exp
CUDNN_VERSION = 91500  # from which on torch itself prefers cuDNN's attention


@functools.cache
def prefers_cudnn() -> bool:
    """Return whether the current GPU and cuDNN are those for which torch prefers cuDNN's attention."""
    if not torch.cuda.is_available() or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    return torch.cuda.get_device_capability()[0] in (9, 10) and (torch.backends.cudnn.version() or 0) >= CUDNN_VERSION


def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return (output, log-sum-exp) by FlashAttention-2."""
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse


def flash_backward(grad, q, k, v, out, lse, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v by FlashAttention-2."""
    return aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, *_no_state(q), scale=scale
    )


def cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return (output, log-sum-exp) by cuDNN."""
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return out, lse.reshape(q.shape[:3])


def cudnn_backward(grad, q, k, v, out, lse, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v by cuDNN."""
    seed, offset = _no_state(q)
    return aten._scaled_dot_product_cudnn_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        lse.unsqueeze(-1),
        seed,
        offset,
        None,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        scale=scale,
    )


def efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float):
    """Return (output, log-sum-exp) by the memory-efficient kernel; all have h heads, bias is (b, h, s, t) with rows of
    16 bytes' alignment."""
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal, scale=scale)
    return out, lse.narrow(-1, 0, q.shape[2])


def efficient_backward(grad, q, k, v, out, lse, bias: Tensor | None, causal: bool, scale: float):
    """Return the gradients of q, k and v by the memory-efficient kernel. An infinite log-sum-exp is that of a query
    without keys, as of the rows that pad it."""
    if missing := -lse.shape[-1] % LSE_ROWS:
        lse = torch.nn.functional.pad(lse, (0, missing), value=float("inf"))
    return aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, bias, out, lse, *_no_state(q), 0.0, [True, True, True, False], causal, scale=scale
    )[:3]


def _no_state(like: Tensor) -> tuple[Tensor, Tensor]:
    """Return a random state that a kernel without dropout does not read."""
    state = torch.empty((), dtype=torch.int64, device=like.device)
    return state, state
