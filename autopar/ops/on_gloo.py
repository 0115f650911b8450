"""Collectives as gloo does them fastest.

Its own all-gather passes all blocks round a ring, n - 1 waits one after the other, into memory of its own that is then
copied. One broadcast from each member, or one send to each, writes where the result is wanted, and all are on their way
at once: the same bytes. Within a machine broadcasts take a little less CPU time. Over a slow link between machines it
matters that all receives are posted before the first send (`start_exchange`): gathers by broadcasts, and gloo's
all-to-all, took up to twice as long there, one direction after the other (benchmarks/results/two_nodes.txt).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.library import custom_op

from .._torch import broadcasts, group_of, start_exchange, waited_for


def _sends(parts: Sequence[Tensor], group_name: str) -> None:
    """Fill part i with what member i of the group has there."""
    own = parts[group_of(group_name).rank()]
    for work in start_exchange([own] * len(parts), parts, group_name):
        work.wait()


def _gathers(way: str, fill: Callable[[Sequence[Tensor], str], None]):
    """Return the op that gathers a tensor and the one that gathers a bucket of several, which fill parts in a way."""

    @custom_op(f"autopar::gather_by_{way}", mutates_args=())
    def gather(x: Tensor, group_size: int, group_name: str) -> Tensor:
        """Return what all members of a group pass, in the order of the group along dim 0: (rows, ...) each ->
        (group_size * rows, ...)."""
        whole = _whole(x, group_size)
        parts = whole.chunk(group_size)
        parts[group_of(group_name).rank()].copy_(x)
        fill(parts, group_name)
        return whole

    @custom_op(f"autopar::gather_bucket_by_{way}", mutates_args=())
    def gather_bucket(shards: Sequence[Tensor], group_size: int, group_name: str) -> list[Tensor]:
        """Return what `gather` does of each of several tensors of one type, which travel together."""
        widths = [x.numel() for x in shards]
        bucket = shards[0].new_empty(group_size, sum(widths))
        torch.cat([x.reshape(-1) for x in shards], out=bucket[group_of(group_name).rank()])
        fill(bucket.unbind(), group_name)
        wholes = [_whole(x, group_size) for x in shards]
        for whole, columns in zip(wholes, bucket.split(widths, 1)):
            whole.view(group_size, -1).copy_(columns)
        return wholes

    gather.register_fake(lambda x, group_size, group_name: _whole(x, group_size))
    gather_bucket.register_fake(lambda shards, group_size, group_name: [_whole(x, group_size) for x in shards])
    return gather, gather_bucket


def _whole(x: Tensor, group_size: int) -> Tensor:
    return x.new_empty(group_size * x.shape[0], *x.shape[1:])


gather_by_broadcasts, gather_bucket_by_broadcasts = _gathers("broadcasts", broadcasts)
gather_by_sends, gather_bucket_by_sends = _gathers("sends", _sends)


@custom_op("autopar::exchange_by_sends", mutates_args=())
def exchange_by_sends(x: Tensor, received: Sequence[int], sent: Sequence[int], group_name: str) -> Tensor:
    """Return what an all-to-all starts to fill: `sent[i]` rows of x go to member i, `received[i]` rows of the result
    come from it. (sum(sent), ...) -> (sum(received), ...), to be waited for by `wait_tensor`."""
    result, own = x.new_empty(sum(received), *x.shape[1:]), group_of(group_name).rank()
    parts, mine = result.split(list(received)), x.contiguous().split(list(sent))
    works = start_exchange(mine, parts, group_name)
    parts[own].copy_(mine[own])
    return waited_for(result, works)


@exchange_by_sends.register_fake
def _(x, received, sent, group_name):
    return x.new_empty(sum(received), *x.shape[1:])
