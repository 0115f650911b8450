"""Rows on their way to the devices that own their experts, and back.

In the planned graph `dispatch` and `combine` change nothing: they are where rows may change between lying in their
order and lying with their experts (a layout, "rows", of autopar/ir/layout.py). `dispatch_tokens` makes the rows of a
token, one for each of its experts, and `combine_tokens` adds them up: a device that has several experts of a token may
be sent it once and send one sum back. On a device that holds rows by expert their number is known at run time alone.
The other ops (here and in token_rows.py) are what a device runs instead of these: no row is dropped, whatever the
routing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import custom_op
from torch.utils.weak import WeakTensorKeyDictionary

from .._torch import traced_number as traced

c10d = torch.ops._c10d_functional


@custom_op("autopar::dispatch", mutates_args=())
def dispatch(x: Tensor, group: Tensor, experts: int) -> Tensor:
    """Return rows (r, ...), each of which belongs to the expert `group` (r) of so many."""
    return x.clone()


@custom_op("autopar::combine", mutates_args=())
def combine(y: Tensor, group: Tensor, experts: int) -> Tensor:
    """Return rows in the order of `group` again."""
    return y.clone()


@custom_op("autopar::dispatch_tokens", mutates_args=())
def dispatch_tokens(x: Tensor, group: Tensor, experts: int) -> Tensor:
    """Return the rows (r, ...) of tokens (t, ...), r / t one after the other of each, that belong to the experts
    `group` (r) of so many."""
    return x.repeat_interleave(len(group) // len(x), 0)


@custom_op("autopar::combine_tokens", mutates_args=())
def combine_tokens(y: Tensor, group: Tensor, experts: int, active: int, dtype: torch.dtype) -> Tensor:
    """Return the sums (r / active, ...) of so many rows of each token. `dtype`: that of what devices send."""
    return y.unflatten(0, (-1, active)).sum(1)


@custom_op("autopar::route", mutates_args=())
def route(
    group: Tensor, experts: int, firsts: list[int], hot: Tensor | None = None, home: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the order of rows by the device that owns their expert, there by expert, and that order's inverse.
    `firsts`: the first expert of every device but the first; `hot`: experts whose rows stay on their own device,
    `home`."""
    is_in_order = hot is None  # the experts of a device follow each other
    place = group if is_in_order else sent_place(group, experts, owner_of(group, firsts, hot, home))
    order = place.argsort(stable=True)
    return order, torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


@custom_op("autopar::told", mutates_args=())
def told(group: Tensor, experts: int, firsts: list[int], active: int) -> Tensor:
    """Return what a device tells each other one before rows are sent: how many tokens go there, if each goes once and
    has so many `active` rows (0 otherwise), and the rows of each of its experts."""
    tokens = torch.zeros(len(firsts) + 1, dtype=torch.int64, device=group.device)
    if active:
        owner = owner_of(group, firsts).view(-1, active)
        is_sent = torch.zeros(len(owner), len(tokens), dtype=torch.int64, device=group.device)
        tokens = is_sent.scatter_(1, owner, 1).sum(0)
    return told_to_each(tokens, group, experts, firsts)


def told_to_each(first: Tensor, group: Tensor, experts: int, firsts: list[int]) -> Tensor:
    """Return for each device one number of `first`, then the rows of each of its experts; the first and the last are
    told of those without an expert, below all and above."""
    counts = expert_counts(group, experts).split(told_sizes(experts, firsts, 0))
    return torch.cat([x for pair in zip(first.split(1), counts) for x in pair])


def told_sizes(experts: int, firsts: Sequence[int], first: int = 1) -> list[int]:
    """Return how many numbers each device is told, so many before those of its experts."""
    ends = [*(at + 1 for at in firsts), experts + 2]
    return [first + end - start for start, end in zip([0, *ends], ends)]


@custom_op("autopar::expert_counts", mutates_args=())
def expert_counts(group: Tensor, experts: int) -> Tensor:
    """Return how many rows belong to each of so many experts, behind those of a number below all and before those
    above, which belong to nobody: (r) -> (experts + 2)."""
    place = group.to(torch.int64).clamp(-1, experts) + 1
    if not place.is_cuda:  # where it would wait for the device
        return torch.bincount(place, minlength=experts + 2)
    counts = torch.zeros(experts + 2, dtype=torch.int64, device=group.device)
    return counts.scatter_add_(0, place, torch.ones_like(place))


@custom_op("autopar::told_on_host", mutates_args=())
def told_on_host(sent: Tensor, received: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Return counts of rows and of tokens, sent and received, (2, devices) each, on the host, which waits for the
    device once. `sizes`: of what each device is told; it gets as much from each."""
    ours, theirs = told_parts(sent, received, sizes)
    rows = [[sum(part[1:]) for part in parts] for parts in (ours, theirs)]
    return torch.tensor(rows), torch.tensor([[part[0] for part in parts] for parts in (ours, theirs)])


def told_parts(sent: Tensor, received: Tensor, sizes: list[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Return on the host what a device tells each other one, and what each tells it."""
    numbers, width = torch.cat([sent, received]).tolist(), len(received) // len(sizes)
    ends = list(itertools.accumulate([*sizes, *[width] * len(sizes)], initial=0))
    parts = [numbers[start:end] for start, end in itertools.pairwise(ends)]
    return parts[: len(sizes)], parts[len(sizes) :]


@custom_op("autopar::groups_received", mutates_args=())
def groups_received(received: Tensor, counts: Tensor, first: int, expected: int, dtype: torch.dtype) -> Tensor:
    """Return the experts of the rows that a device gets, from what it was told by each device of a group; the first
    expert that it was told of is `first`. `counts`: of rows, on the host; `expected` rows where a graph is made."""
    rows = received.view(counts.shape[1], -1)[:, 1:]
    numbers = torch.arange(first, first + rows.shape[1], dtype=dtype, device=rows.device).repeat(len(rows))
    return numbers.repeat_interleave(rows.reshape(-1), output_size=int(counts[1].sum()))


@custom_op("autopar::own_rows", mutates_args=())
def own_rows(
    group: Tensor,
    experts: int,
    firsts: list[int],
    blocks: list[int],
    device: int,
    expected: int,
    hot: Tensor | None = None,
) -> Tensor:
    """Return which rows belong to the experts of one device, `expected` ones where a graph is made, in the order in
    which they would come if device i had sent those of block i. Those of `hot` experts belong to the device in whose
    block they are; `blocks`: the first row of each but the first."""
    block = owner_of(torch.arange(len(group), device=group.device), blocks)
    rows = (owner_of(group, firsts, hot, block) == device).nonzero().squeeze(1)
    return rows[sent_place(group, experts, block)[rows].argsort(stable=True)]


def sent_place(group: Tensor, experts: int, device: Tensor) -> Tensor:
    """Return numbers by which rows are sorted first by a device, then by their expert."""
    return device * (experts + 2) + group.clamp(-1, experts)


@custom_op("autopar::counts_on_host", mutates_args=())
def counts_on_host(sent: Tensor, received: Tensor) -> Tensor:
    """Return counts of rows (2, devices) on the host, which waits for the device once."""
    return torch.stack([sent, received]).cpu()


@custom_op("autopar::exchange_rows", mutates_args=())
def exchange_rows(x: Tensor, counts: Tensor, is_way_back: bool, expected: int, group_name: str) -> Tensor:
    """Start to send counts[0] rows of x to each device of a group and to receive counts[1], on the way back the
    reverse; `expected` ones where a graph is made. What is returned is to be waited for by `wait_tensor`."""
    sent, received = sizes(counts, is_way_back)
    return c10d.all_to_all_single(x, received, sent, group_name)


def sizes(counts: Tensor, is_way_back: bool) -> tuple[list[int], list[int]]:
    """Return how many rows go to each device, and come from each."""
    sent, received = counts.tolist()
    return (received, sent) if is_way_back else (sent, received)


def owner_of(group: Tensor, firsts: list[int], hot: Tensor | None = None, home: Tensor | int = 0) -> Tensor:
    """Return the device that has the expert of each row; of the rows of `hot` experts their `home`."""
    owner = torch.bucketize(group, torch.tensor(firsts, dtype=group.dtype, device=group.device), right=True)
    return owner if hot is None else torch.where(torch.isin(group, hot), home, owner)


_rows: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # of traced counts, by the way that they say


def rows_by(counts: Tensor, is_way_back: bool, expected: int) -> int:
    """Return how many rows counts say where an op is traced, always the same for the same ones."""
    known = _rows.setdefault(counts, {})
    if is_way_back not in known:
        known[is_way_back] = traced(expected)
    return known[is_way_back]


dispatch.register_fake(lambda x, group, experts: torch.empty_like(x))
combine.register_fake(lambda y, group, experts: torch.empty_like(y))
dispatch_tokens.register_fake(lambda x, group, experts: x.new_empty(len(group), *x.shape[1:]))
combine_tokens.register_fake(lambda y, group, experts, active, dtype: y.new_empty(len(y) // active, *y.shape[1:]))


@route.register_fake
def _(group, experts, firsts, hot=None, home=0):
    order = group.new_empty(group.shape, dtype=torch.int64)
    return order, torch.empty_like(order)


told.register_fake(lambda group, experts, firsts, active: group.new_empty(experts + 3 + len(firsts), dtype=torch.int64))
expert_counts.register_fake(lambda group, experts: group.new_empty(experts + 2, dtype=torch.int64))


@told_on_host.register_fake
def _(sent, received, sizes):
    rows = sent.new_empty(2, len(sizes), device="cpu")
    return rows, torch.empty_like(rows)


@groups_received.register_fake
def _(received, counts, first, expected, dtype):
    return received.new_empty(rows_by(counts, False, expected), dtype=dtype)


own_rows.register_fake(
    lambda group, experts, firsts, blocks, device, expected, hot=None: group.new_empty(
        traced(expected), dtype=torch.int64
    )
)
counts_on_host.register_fake(lambda sent, received: sent.new_empty(2, len(sent), device="cpu"))


@exchange_rows.register_fake
def _(x, counts, is_way_back, expected, group_name):
    return x.new_empty(rows_by(counts, is_way_back, expected), *x.shape[1:])
