"""Share what all forms of attention need: torch's CPU kernel (attention_cpu.py), its kernels for GPUs
(attention_gpu.py) and the form written out block by block (attention_blocks.py).

A query that the mask closes to every key (the padding of a batch that is padded on the left, under a causal mask) has
the output 0, the log-sum-exp -inf and gives no gradient, in all forms, as torch's own attention has it. A mask of the
lowest finite number closes nothing: such a query attends to all keys alike. The kernels then lose their log-sum-exp in
rounding and give a gradient as many times too large as there are keys, as they do in eager torch; the blocks give the
gradient of what they compute.

Tensors: q, out and grad (b, h, s, d), k and v (b, h_kv, t, d) with h a multiple of h_kv, additive mask, broadcastable
to (b, h, s, t), lse (b, h, s).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Like(Protocol):
    """The form of a tensor."""

    @property
    def shape(self) -> Sequence[int]:
        """Return the shape."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of an element."""


@dataclass(frozen=True)
class Form:
    """`forward(q, k, v, mask, causal, scale)` gives (output, log-sum-exp), `backward(grad, q, k, v, out, lse, mask,
    causal, scale)` the gradients of q, k and v. One that `takes_first` also takes `first`, the number of the first
    query, and backward `lse_is_exact` (autopar/ops/attention_blocks.py)."""

    name: str
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    takes_first: bool = False


def numel(x: Like) -> int:
    """Return how many elements a tensor has."""
    return math.prod(x.shape)


def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a mask that says what to keep as one that is added to the scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of the log-sum-exp of queries of type `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def closed_rows(mask: Tensor, causal: bool, rows: int, columns: int) -> Tensor:
    """Return whether each query may attend to no key, broadcastable to (b, h, s)."""
    closed = mask == float("-inf")
    if not causal:
        return closed.all(-1)
    if mask.dim() < 2 or mask.shape[-2] == 1:  # of keys alone: the first query that may attend to one opens all later
        closed = closed.expand(*closed.shape[:-1], columns)
        opened = closed.logical_not().cumsum(-1)
        last = torch.arange(rows, device=mask.device).clamp(max=columns - 1)
        return (opened if mask.dim() < 2 else opened.squeeze(-2)).index_select(-1, last) == 0
    later = torch.ones(rows, columns, dtype=torch.bool, device=mask.device).triu(1)
    return (closed | later).all(-1)


def repeated(kv: Tensor, q: Tensor) -> Tensor:
    """Repeat every head of keys or values as often as it has queries, in place (h0 h0 h1 h1)."""
    times = q.shape[1] // kv.shape[1]
    return kv if times == 1 else kv.repeat_interleave(times, 1)


def summed(grad: Tensor, kv: Tensor) -> Tensor:
    """Return the gradient of heads from that of `repeated` ones."""
    times = grad.shape[1] // kv.shape[1]
    return grad if times == 1 else grad.unflatten(1, (kv.shape[1], times)).sum(2)


def contiguous(x: Tensor) -> Tensor:
    """Return the same values without gaps."""
    return x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)


def adjacent(x: Tensor) -> Tensor:
    """Return the same values with adjacent elements in the last dim: kernels read them so, some without checking."""
    return x if x.stride(-1) == 1 else contiguous(x)
