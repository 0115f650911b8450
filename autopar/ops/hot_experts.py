"""The experts with most rows, copies of their matrices on every device, and what is left to be sent without their rows.

Which experts are hot is known at run time: every device learns from all others how many rows they have for each expert
and takes those with most, of equally many those with the lower number, so that all devices take the same. Rows of hot
experts stay on the device that has them. Behind the matrices of its own experts a device has the copies, in the order
of the hot experts, and a row's slot says which matrix it has: that of an own expert, or the copy.

Counts of rows have two places more than there are experts, for rows of a number below all experts, and above: they
belong to nobody, but are sent like others.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from .expert_rows import owner_of

NONE = -1  # the slot of rows without a matrix on a device


@custom_op("autopar::hot_experts", mutates_args=())
def hot_experts(counts: Tensor, experts: int, hot: int) -> Tensor:
    """Return so many experts with most rows, from the counts of one device after the other: (d x (experts + 2)) ->
    (hot)."""
    rows = counts.view(-1, experts + 2).sum(0)[1:-1]
    return rows.argsort(descending=True, stable=True)[:hot].clone()


@custom_op("autopar::counts_beside_hot", mutates_args=())
def counts_beside_hot(counts: Tensor, hot: Tensor, firsts: list[int], home: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return how many rows the device `home` sends to each device, its own among them, and gets of each, if those of
    hot experts stay where they are, and what each would tell it of rows and their experts: (d x (experts + 2)) -> (d),
    (d), (d x (1 + experts + 2))."""
    table = counts.view(len(firsts) + 1, -1)
    experts = torch.arange(-1, table.shape[1] - 1, dtype=hot.dtype, device=hot.device)
    is_hot, owner = torch.isin(experts, hot), owner_of(experts, firsts)
    received = table * ((owner == home) & ~is_hot)
    received[home] += table[home] * is_hot
    sent = torch.zeros(len(table), dtype=table.dtype, device=table.device)
    sent.scatter_add_(0, torch.where(is_hot, home, owner), table[home])
    return sent, received.sum(1), torch.cat([received.new_zeros(len(table), 1), received], 1).view(-1)


@custom_op("autopar::slots_of", mutates_args=())
def slots_of(group: Tensor, hot: Tensor, experts: int, first: int, own: int) -> Tensor:
    """Return the slots of rows, from `first` on: those of as many `own` experts, then those of the hot ones; lower ones
    for rows of others. An own expert that is hot has that of its copy."""
    slots = torch.full((experts + 2,), first + NONE, dtype=group.dtype, device=group.device)
    places = torch.arange(first, first + own + len(hot), dtype=group.dtype, device=group.device)
    slots[first + 1 : first + own + 1] = places[:own]
    slots.index_copy_(0, hot + 1, places[own:])
    return slots[group.clamp(-1, experts) + 1]


@custom_op("autopar::copies_of", mutates_args=())
def copies_of(weight: Tensor, hot: Tensor, first: int) -> Tensor:
    """Return a device's share of the copies of hot experts' matrices, whose sum over devices they are: (own, ...) ->
    (hot, ...), zero where the expert is none of its own, which begin at `first`."""
    place = hot - first
    picked = weight.index_select(0, place.clamp(0, len(weight) - 1))
    return picked.masked_fill_(_wide(~_is_own(place, weight), weight), 0)


@custom_op("autopar::added_to_owners", mutates_args=())
def added_to_owners(dw: Tensor, copies: Tensor, hot: Tensor, first: int) -> Tensor:
    """Return gradients (own + hot, ...) of the matrices of a device and of copies, with those of the copies summed over
    devices, (hot, ...), as gradients (own, ...): each is added to that of its expert, if that is one of its own."""
    own = dw[: len(dw) - len(hot)].clone()
    place = hot - first
    added = copies.to(own.dtype).masked_fill(_wide(~_is_own(place, own), own), 0)
    return own.index_add_(0, place.clamp(0, len(own) - 1), added)


def _is_own(place: Tensor, weight: Tensor) -> Tensor:
    return (place >= 0) & (place < len(weight))


def _wide(flags: Tensor, weight: Tensor) -> Tensor:
    return flags.view(-1, *[1] * (weight.dim() - 1))


hot_experts.register_fake(lambda counts, experts, hot: counts.new_empty(min(hot, experts)))
slots_of.register_fake(lambda group, hot, experts, first, own: torch.empty_like(group))
copies_of.register_fake(lambda weight, hot, first: weight.new_empty(len(hot), *weight.shape[1:]))
added_to_owners.register_fake(lambda dw, copies, hot, first: dw.new_empty(len(dw) - len(hot), *dw.shape[1:]))


@counts_beside_hot.register_fake
def _(counts, hot, firsts, home):
    sent = counts.new_empty(len(firsts) + 1)
    return sent, torch.empty_like(sent), counts.new_empty(len(counts) + len(sent))
