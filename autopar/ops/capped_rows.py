"""Rows that go to the devices of their experts so many at a time, whatever the routing.

Of the rows that one device has for another, the pair's, at most `limit` go in a round: capacity times what the pair
would have under balanced routing. All devices of a group make as many rounds as the fullest of their pairs needs, which
they know from the counts that they tell each other anyway: with each count comes the largest of its sender.

A table (3, devices) on the host says which rows a device has: how many for each other device, how many from each, and
behind them the limit and the number of rounds.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.library import custom_op

from .expert_rows import expert_counts, own_rows, owner_of, told_parts, told_sizes, told_to_each


def limit_of(rows: int, devices: int, capacity: float) -> int:
    """Return how many rows of a pair go in one round, if a device has so many for all devices."""
    return max(1, math.ceil(capacity * rows / devices))


def rounds_of(table: Tensor) -> int:
    """Return how many rounds the devices of a table make."""
    return int(table[2, 1])


@custom_op("autopar::told_in_rounds", mutates_args=())
def told_in_rounds(group: Tensor, experts: int, firsts: list[int]) -> Tensor:
    """Return what a device tells each other one before rows are sent: the most rows that it has for a device, and the
    rows of each of that one's experts."""
    counts = expert_counts(group, experts).split(told_sizes(experts, firsts, 0))
    largest = torch.stack([part.sum() for part in counts]).max()
    return told_to_each(largest.repeat(len(counts)), group, experts, firsts)


@custom_op("autopar::counts_in_rounds", mutates_args=())
def counts_in_rounds(sent: Tensor, received: Tensor, sizes: list[int], rows: int, capacity: float) -> Tensor:
    """Return the table of what a device told, in so many numbers each device, and was told, on the host, which waits
    for the device once. `rows`: that the device with most of them has for all."""
    ours, theirs = told_parts(sent, received, sizes)
    to, of = (torch.tensor([sum(part[1:]) for part in parts]) for parts in (ours, theirs))
    largest = max(part[0] for part in (*ours, *theirs))
    return _table(to, of, largest, limit_of(rows, len(sizes), capacity))


@custom_op("autopar::round_groups", mutates_args=())
def round_groups(groups: Tensor, table: Tensor, number: int, expected: int) -> Tensor:
    """Return the experts of the rows that a device gets in one round, from those of all rows that it gets."""
    return _of_round(groups, table, 1, number)


@custom_op("autopar::own_rows_by_block", mutates_args=())
def own_rows_by_block(
    group: Tensor,
    experts: int,
    firsts: list[int],
    blocks: list[int],
    device: int,
    rows: int,
    capacity: float,
    expected: int,
) -> tuple[Tensor, Tensor]:
    """Return which rows belong to the experts of one device, and their table, where every device has all rows: block i
    is what device i would send. `blocks`: the first row of each but the first; `expected` rows where a graph is
    made."""
    picked = own_rows(group, experts, firsts, blocks, device, expected)
    counts = owner_of(picked, blocks).bincount(minlength=len(blocks) + 1).cpu()
    return picked, _table(counts, counts, int(counts.max()), limit_of(rows, len(counts), capacity))


@custom_op("autopar::round_rows", mutates_args=())
def round_rows(order: Tensor, table: Tensor, number: int, expected: int) -> Tensor:
    """Return those rows of an order by device that a device sends in one round, or of an order by block that it
    picks."""
    return _of_round(order, table, 0, number)


@custom_op("autopar::round_counts", mutates_args=())
def round_counts(table: Tensor, number: int) -> Tensor:
    """Return how many rows go to each device in one round, and how many come from each: (2, devices) on the host."""
    limit = int(table[2, 0])
    return (table[:2] - number * limit).clamp(0, limit)


@custom_op("autopar::place_rows", mutates_args=())
def place_rows(y: Tensor, index: Tensor, rows: int) -> Tensor:
    """Return so many rows, those of `index` from y, the others zero."""
    return y.new_zeros(rows, *y.shape[1:]).index_copy_(0, index, y)


def _of_round(values: Tensor, table: Tensor, line: int, number: int) -> Tensor:
    """Return those of the values of rows that are sent (line 0 of a table) or received (1) that are of one round."""
    limit = int(table[2, 0])
    return torch.cat([part[number * limit : (number + 1) * limit] for part in values.split(table[line].tolist())])


def _table(sent: Tensor, received: Tensor, largest: int, limit: int) -> Tensor:
    last = torch.zeros_like(sent)
    last[0], last[1] = limit, max(1, -(-largest // limit))
    return torch.stack([sent, received, last])


told_in_rounds.register_fake(
    lambda group, experts, firsts: group.new_empty(experts + 3 + len(firsts), dtype=torch.int64)
)
counts_in_rounds.register_fake(
    lambda sent, received, sizes, rows, capacity: sent.new_empty(3, len(sizes), device="cpu")
)
round_groups.register_fake(lambda groups, table, number, expected: groups.new_empty(expected))
round_rows.register_fake(lambda order, table, number, expected: order.new_empty(expected))
round_counts.register_fake(lambda table, number: table.new_empty(2, table.shape[1]))
place_rows.register_fake(lambda y, index, rows: y.new_empty(rows, *y.shape[1:]))


@own_rows_by_block.register_fake
def _(group, experts, firsts, blocks, device, rows, capacity, expected):
    table = group.new_empty(3, len(blocks) + 1, dtype=torch.int64, device="cpu")
    return group.new_empty(expected, dtype=torch.int64), table
