"""Ops between the steps of ring attention: outputs of two blocks become one, and a result waits for messages."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from . import attention_rows


@custom_op("autopar::join_attention", mutates_args=())
def join_attention(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor, is_last: bool) -> tuple[Tensor, Tensor]:
    """Return (output, log-sum-exp) over two sets of keys: outputs (b, h, s, d), log-sum-exps (b, h, s). The output is
    in the log-sum-exp's type, so that many can be added up; after the last in the type of `more`."""
    joined, total = attention_rows.joined((out.to(lse.dtype), lse), (more.to(lse.dtype), more_lse))
    if is_last:
        joined = joined.to(more.dtype).transpose(1, 2).contiguous().transpose(1, 2)  # stored as (b, s, h, d)
    return joined, total


@join_attention.register_fake
def _(out, lse, more, more_lse, is_last):
    b, h, s, d = out.shape
    if not is_last:
        return out.new_empty(out.shape, dtype=lse.dtype), lse.new_empty(lse.shape)
    return more.new_empty(b, s, h, d).transpose(1, 2), lse.new_empty(lse.shape)


@custom_op("autopar::after", mutates_args=())
def after(x: Tensor, marks: list[Tensor]) -> Tensor:
    """Return a copy of x. `marks`, empty tensors made of what arrived, keep exchanges in a graph of which a device
    needs nothing, but takes part in."""
    return x.clone(memory_format=torch.preserve_format)


@after.register_fake
def _(x, marks):
    return torch.empty_like(x, memory_format=torch.preserve_format)
