"""Attention sinks: a score a head, of no key, that takes its share of every query's weights (GPT-OSS; Xiao et al.,
arXiv 2309.17453, learned).

A sink is a key with the value 0. Output and log-sum-exp over it and all keys follow from those over the keys, and any
kernel makes the gradients of queries, keys and values from the joint ones. The sink's own follows from them as well:

    lse' = log(exp(lse) + exp(sink))    out' = out exp(lse - lse')    dsink = -sum of exp(sink - lse') grad . out'
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op


def joined(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return (output, log-sum-exp) over keys and sinks from those over keys: (b, h, s, d), (b, h, s); sinks (h,)."""
    joint = torch.logaddexp(lse, _of_rows(sinks, lse))
    return (out * (lse - joint).exp().unsqueeze(-1)).to(out.dtype), joint


@custom_op("autopar::join_sinks", mutates_args=())
def join_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return (output, log-sum-exp) over keys and sinks, as `joined` does; outputs stored as (b, s, h, d)."""
    out, joint = joined(out, lse, sinks)
    return out.transpose(1, 2).contiguous().transpose(1, 2), joint


@custom_op("autopar::attention_sinks_bw", mutates_args=())
def attention_sinks_bw(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks (h,): output, its gradient (b, h, s, d) and log-sum-exp (b, h, s) over keys and
    sinks."""
    weights = (_of_rows(sinks, lse) - lse).exp()
    through = torch.einsum("bhsd,bhsd->bhs", grad.to(lse.dtype), out.to(lse.dtype))
    return -(weights * through).sum((0, 2)).to(sinks.dtype)


def _of_rows(sinks: Tensor, lse: Tensor) -> Tensor:
    """Return sinks as (1, h, 1) in the log-sum-exp's type."""
    return sinks.to(lse.dtype).reshape(1, -1, 1)


@join_sinks.register_fake
def _(out, lse, sinks):
    b, h, s, d = out.shape
    return out.new_empty(b, s, h, d).transpose(1, 2), lse.new_empty(lse.shape)


@attention_sinks_bw.register_fake
def _(grad, out, lse, sinks):
    return torch.empty_like(sinks)
