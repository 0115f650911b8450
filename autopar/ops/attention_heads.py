"""Attention of some heads of the queries, on a device that holds more heads of keys than these read.

With grouped queries `group` heads of the queries read one of keys. Where more devices share the queries' heads than
there are heads of keys, or a number that does not divide them, each device has the heads of keys whole and reads those
of its own queries, the first of which is number `head`: key-value heads are replicated, and their gradients are sums
over the devices. `group` is 0 where the heads of keys are those that the queries read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .attention_forms import Like


def heads_read(q: Like, head: int, group: int) -> tuple[int, int]:
    """Return the number of the first head of keys that the queries read, and how many they read."""
    first = head // group
    return first, (head + q.shape[1] - 1) // group + 1 - first


def is_grouped_evenly(q: Like, head: int, group: int) -> bool:
    """Return whether each head of keys that is read is read by as many heads of queries, so that kernels may group."""
    return heads_read(q, head, group)[1] == 1 or head % group == q.shape[1] % group == 0


def read(kv: Tensor, q: Tensor, head: int, group: int) -> Tensor:
    """Return the heads of keys or values that the queries read; one a head of the queries where groups are uneven."""
    if not group:
        return kv
    if is_grouped_evenly(q, head, group):
        return kv.narrow(1, *heads_read(q, head, group))
    return kv.index_select(1, _numbers(kv, q, head, group))


def of_all(gradient: Tensor, kv: Tensor, q: Tensor, head: int, group: int) -> Tensor:
    """Return the gradient of all heads of `kv` from that of `read`: zero for those that no query here reads."""
    if not group:
        return gradient
    whole = kv.new_zeros(kv.shape)
    if is_grouped_evenly(q, head, group):
        whole.narrow(1, *heads_read(q, head, group)).copy_(gradient)
        return whole
    return whole.index_add_(1, _numbers(kv, q, head, group), gradient)


def _numbers(kv: Tensor, q: Tensor, head: int, group: int) -> Tensor:
    return torch.arange(head, head + q.shape[1], device=kv.device) // group
