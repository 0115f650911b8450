"""Ring attention among packed documents: a device gets the keys alone that are of documents of its queries.

Every device has the documents of all keys, integers, so all find alike which rows of which block each of them reaches
(`reached_rows`), with no message, once for all attentions that read the same integers. The host waits once for them.
An exchange then sends and receives as many rows as that says (ring.py), which no program knows before; in a step in
which nobody reaches anything nothing is called. What arrives lies between zeros for the keys that only a causal mask
or a window would open. Gradients go home at once.

A key is reached if its integer is between the least and the greatest of the device's queries, of its own sample; of a
block all from the first to the last of them are sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.library import custom_op

from .._torch import start_all_to_all, waited_for
from .ring import Block, Ring, Rows, count, ring_of


@custom_op("autopar::reached_rows", mutates_args=())
def reached_rows(documents: Tensor, ends: Sequence[int], size: int, causal: bool, window: int) -> Tensor:
    """Return which rows of each block the queries of each device reach, (size, size, 2), on the host. `documents`
    (b, t): of all keys; `ends`: the first place and the one behind the last of every range of the blocks."""
    ranges = list(zip(ends[::2], ends[1::2], strict=True))
    parts = len(ranges) // size
    blocks = tuple(tuple(ranges[parts * i : parts * (i + 1)]) for i in range(size))
    ring, ids = ring_of(blocks, causal, window, parts > 1), documents.cpu()
    rows = [[_among(ids, ring, blocks, place, step) for step in range(size)] for place in range(size)]
    return torch.tensor([[rows[place][(place - block) % size] for block in range(size)] for place in range(size)])


def _among(documents: Tensor, ring: Ring, blocks: Sequence[Block], place: int, step: int) -> Rows:
    """Return which rows of its block a device reaches in a step."""
    start, stop = ring.reached(place, step)
    if step == 0 or start == stop:
        return start, stop
    keys = _at(documents, blocks[ring.block(place, step)])[:, start:stop]
    queries = blocks[place] if len(ring.open_halves(place, step)) == len(ring.halves) else blocks[place][1:]
    found = torch.zeros(stop - start, dtype=torch.bool)
    for part in queries:
        own = _at(documents, [part])
        low, high = own.amin(-1, keepdim=True), own.amax(-1, keepdim=True)
        found |= ((keys >= low) & (keys <= high)).any(0)
    reached = found.nonzero()
    return (start + int(reached[0]), start + int(reached[-1]) + 1) if len(reached) else (0, 0)


def _at(documents: Tensor, places: Iterable[Rows]) -> Tensor:
    return torch.cat([documents[:, start:stop] for start, stop in places], 1)


@custom_op("autopar::exchange_reached", mutates_args=())
def exchange_reached(
    own: Tensor,
    held: Tensor,
    held_first: int,
    reached: Tensor,
    place: int,
    step: int,
    of_gradients: bool,
    first: int,
    expected: int,
    group_name: str,
) -> Tensor:
    """Return what an exchange of rows starts to fill, (expected, columns), to be waited for by `wait_tensor`: keys that
    the device at `place` reaches in a step, or gradients of its own block made in it, between zeros. `own`: the rows of
    its own block; `held`: those of the block that it has, from number `held_first` on, or their gradients; `reached`:
    of `reached_rows`; `first`: the number of the first row that may come."""
    result = own.new_zeros(expected, own.shape[1])
    ring = ring_among(reached)
    if step in ring.steps:
        sent, received = counts(reached, place, step, of_gradients)
        message = outgoing(own, held, held_first, reached, place, step, of_gradients)
        landing = _landing(result, ring, place, step, of_gradients, first)
        waited_for(result, [start_all_to_all(landing, message, received, sent, group_name)])
    return result


@exchange_reached.register_fake
def _(own, held, held_first, reached, place, step, of_gradients, first, expected, group_name):
    return own.new_empty(expected, own.shape[1])


@reached_rows.register_fake
def _(documents, ends, size, causal, window):
    return torch.empty(size, size, 2, dtype=torch.int64)


def ring_among(reached: Tensor) -> Ring:
    """Return what is sent where."""
    return Ring(tuple(tuple(map(tuple, of_device)) for of_device in reached.tolist()), is_passed_on=False)


def counts(reached: Tensor, place: int, step: int, of_gradients: bool) -> tuple[list[int], list[int]]:
    """Return how many rows go to each device, and come from each."""
    ring = ring_among(reached)
    others = [(ring.gradients_to if of_gradients else ring.keys_from)(p, step) for p in range(ring.size)]
    rows = [count(ring.reached(p, step)) for p in range(ring.size)]
    by_others = [rows[p] if other == place else 0 for p, other in enumerate(others)]
    by_itself = [rows[place] if p == others[place] else 0 for p in range(ring.size)]
    return (by_itself, by_others) if of_gradients else (by_others, by_itself)


def outgoing(
    own: Tensor, held: Tensor, held_first: int, reached: Tensor, place: int, step: int, of_gradients: bool
) -> Tensor:
    """Return a copy of the rows that a device sends, by the device that they go to: a compiled program writes over what
    it reads no more, while that is still on its way."""
    ring = ring_among(reached)
    if of_gradients:
        return _some(held, ring.reached(place, step), held_first).clone()
    parts = [
        _some(own, ring.reached(to, step)) if ring.block(to, step) == place
        else _some(held, ring.reached(to, step), held_first)
        for to in ring.keys_to(place, step)
    ]  # fmt: skip
    return torch.cat(parts) if parts else own[:0]


def placed(
    arrived: Tensor, reached: Tensor, place: int, step: int, of_gradients: bool, first: int, expected: int
) -> Tensor:
    """Return what arrived between zeros."""
    result = arrived.new_zeros(expected, arrived.shape[1])
    _landing(result, ring_among(reached), place, step, of_gradients, first).copy_(arrived)
    return result


def _landing(result: Tensor, ring: Ring, place: int, step: int, of_gradients: bool, first: int) -> Tensor:
    """Return where in a result rows arrive: the keys of the device, or gradients by the one that has its block."""
    of = (place + step) % ring.size if of_gradients else place
    return _some(result, ring.reached(of, step), first)


def _some(x: Tensor, rows: Rows, first: int = 0) -> Tensor:
    """Return rows of a block that x has from number `first` on."""
    return x[rows[0] - first : rows[1] - first] if count(rows) else x[:0]
