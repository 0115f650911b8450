"""Collectives as one send to each other member of a group, which is how they are fastest on gloo.

gloo's own all-gather passes all blocks round a ring, n - 1 waits one after the other, into memory of its own that is
then copied. Sends write where the result is wanted, and all are on their way at once: the same bytes. Over a slow link
between nodes it matters that receives are posted before sends (`start_exchange`): where one waited for the other,
gathers took up to twice as long, one direction after the other (benchmarks/results/two_nodes.txt).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import custom_op

from .._torch import group_of, start_exchange, waited_for


@custom_op("autopar::gather_by_sends", mutates_args=())
def gather_by_sends(x: Tensor, group_size: int, group_name: str) -> Tensor:
    """Return what all members of a group pass, in the order of the group along dim 0: (rows, ...) each -> (group_size *
    rows, ...)."""
    whole = _whole(x, group_size)
    parts = whole.chunk(group_size)
    own = parts[group_of(group_name).rank()].copy_(x)
    _send_to_all(own, parts, group_name)
    return whole


@custom_op("autopar::gather_bucket_by_sends", mutates_args=())
def gather_bucket_by_sends(shards: Sequence[Tensor], group_size: int, group_name: str) -> list[Tensor]:
    """Return `gather_by_sends` of each of several tensors of one type, which travel together."""
    widths = [x.numel() for x in shards]
    bucket = shards[0].new_empty(group_size, sum(widths))
    own = bucket[group_of(group_name).rank()]
    torch.cat([x.reshape(-1) for x in shards], out=own)
    _send_to_all(own, bucket.unbind(), group_name)
    wholes = [_whole(x, group_size) for x in shards]
    for whole, columns in zip(wholes, bucket.split(widths, 1)):
        whole.view(group_size, -1).copy_(columns)
    return wholes


@custom_op("autopar::exchange_by_sends", mutates_args=())
def exchange_by_sends(x: Tensor, received: Sequence[int], sent: Sequence[int], group_name: str) -> Tensor:
    """Return what an all-to-all starts to fill: `sent[i]` rows of x go to member i, `received[i]` rows of the result
    come from it. (sum(sent), ...) -> (sum(received), ...), to be waited for by `wait_tensor`."""
    result, own = x.new_empty(sum(received), *x.shape[1:]), group_of(group_name).rank()
    parts, mine = result.split(list(received)), x.contiguous().split(list(sent))
    works = start_exchange(mine, parts, group_name)
    parts[own].copy_(mine[own])
    return waited_for(result, works)


def _send_to_all(own: Tensor, parts: Sequence[Tensor], group_name: str) -> None:
    for work in start_exchange([own] * len(parts), parts, group_name):
        work.wait()


def _whole(x: Tensor, group_size: int) -> Tensor:
    return x.new_empty(group_size * x.shape[0], *x.shape[1:])


@gather_by_sends.register_fake
def _(x, group_size, group_name):
    return _whole(x, group_size)


@gather_bucket_by_sends.register_fake
def _(shards, group_size, group_name):
    return [_whole(x, group_size) for x in shards]


@exchange_by_sends.register_fake
def _(x, received, sent, group_name):
    return x.new_empty(sum(received), *x.shape[1:])
