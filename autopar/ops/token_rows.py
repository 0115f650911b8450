"""Tokens that are sent once to each device that has some of their experts, and one sum of their rows that comes back.

A device sends the tokens for one device in their order. Which of the rows that arrive is of which token is said by a
number with each row, the place of its token among those that its device sends. How many tokens come is told together
with how many rows, or, where it is not, known from those numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from .._torch import traced_number as traced
from .expert_rows import owner_of, rows_by


@custom_op("autopar::route_tokens", mutates_args=())
def route_tokens(
    group: Tensor, order: Tensor, firsts: list[int], active: int, ways: int, hot: Tensor | None = None, home: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return which tokens to send, sorted by device, for each row in `order` the place of its token among those that go
    to its device, and how many tokens go to each device. `firsts`: the first expert of every device but the first;
    `ways`: the devices that a token goes to where a graph is made; `hot`, `home` as of `route`."""
    owner = owner_of(group, firsts, hot, home).view(-1, active)
    is_sent = torch.zeros(len(owner), len(firsts) + 1, dtype=torch.bool, device=group.device).scatter_(1, owner, True)
    number = is_sent.cumsum(0, dtype=torch.int32)
    sent = is_sent.t().nonzero()[:, 1].clone()  # compiled code takes no view that begins anywhere
    return sent, (number.gather(1, owner) - 1).view(-1)[order], is_sent.sum(0)


@custom_op("autopar::places_of_tokens", mutates_args=())
def places_of_tokens(place: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """Return the token of each row among all that were received, from its place among those of its device. `rows`,
    `tokens`: counts (2, devices) on the host, sent and received."""
    starts = (tokens[1].cumsum(0) - tokens[1]).repeat_interleave(rows[1])
    return starts.to(place.device) + place


@custom_op("autopar::token_counts", mutates_args=())
def token_counts(sent: Tensor, place: Tensor, counts: Tensor) -> Tensor:
    """Return counts of tokens (2, devices) on the host, sent and received, from the places of received rows, of which
    `counts` (2, devices) says how many came from each device: every token has a row. It waits for the device once."""
    device = torch.arange(len(sent), device=place.device).repeat_interleave(counts[1].to(place.device))
    received = torch.zeros_like(sent).scatter_reduce_(0, device, place.to(sent.dtype) + 1, "amax")
    return torch.stack([sent, received]).cpu()


@custom_op("autopar::sum_rows", mutates_args=())
def sum_rows(y: Tensor, place: Tensor, counts: Tensor, expected: int) -> Tensor:
    """Return the sums of the rows of each token that was received, (r, ...), (r) -> (tokens, ...); `expected` ones
    where a graph is made."""
    return y.new_zeros(int(counts[1].sum()), *y.shape[1:]).index_add_(0, place, y)


@route_tokens.register_fake
def _(group, order, firsts, active, ways, hot=None, home=0):
    tokens = group.new_empty(traced(len(group) // active * ways), dtype=torch.int64)
    places = order.new_empty(len(order), dtype=torch.int32)
    return tokens, places, group.new_empty(len(firsts) + 1, dtype=torch.int64)


places_of_tokens.register_fake(lambda place, rows, tokens: place.new_empty(place.shape, dtype=torch.int64))
token_counts.register_fake(lambda sent, place, counts: sent.new_empty(2, len(sent), device="cpu"))


@sum_rows.register_fake
def _(y, place, counts, expected):
    return y.new_empty(rows_by(counts, True, expected), *y.shape[1:])
