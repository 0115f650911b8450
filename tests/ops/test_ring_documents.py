"""Rows that documents reach: all devices find the same ones, each sends what another expects, and nothing that a query
needs is left out."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from autopar.ops import autopar
from autopar.ops.ring_documents import counts, outgoing, placed

from .test_ring import KINDS, blocks_of

SAMPLES = 2


def case(size: int, kind: str, is_packed: bool):
    """Return documents of all keys, packed or anywhere, the rows of blocks that are reached, and by device and block
    which keys some query of the device may attend to."""
    seed = random.randrange(10**6)
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    causal, window, zigzag = KINDS[kind]
    blocks = blocks_of(size, zigzag)
    length = max(stop for block in blocks for _, stop in block)
    ids = torch.randint(0, 3, (SAMPLES, length), generator=generator)
    ids = (ids == 0).cumsum(-1) if is_packed else ids
    ends = [place for block in blocks for ends in block for place in ends]
    place = torch.arange(length)
    behind = place[:, None] - place
    keep = (ids[:, :, None] == ids[:, None]).any(0)
    keep &= behind >= 0 if causal else behind.abs() >= 0
    keep &= behind.abs() < window if window else behind.abs() >= 0
    held = [torch.cat([place[slice(*ends)] for ends in block]) for block in blocks]
    opened = [[keep[queries][:, keys].any(0) for keys in held] for queries in held]
    return ids, autopar.reached_rows(ids, ends, size, causal, window), opened


CASES = [*itertools.product((1, 2, 3, 4, 7), KINDS, (True, False))]


@pytest.mark.parametrize("size, kind, is_packed", CASES)
def test_rows_are_those_that_documents_open(size, kind, is_packed):
    """They are from the first to the last that is open; of documents that are in no order there may be more."""
    _, reached, opened = case(size, kind, is_packed)
    for place, block in itertools.product(range(size), repeat=2):
        start, stop = reached[place, block].tolist()
        found = opened[place][block].nonzero().flatten().tolist()
        assert all(start <= row < stop for row in found)
        if place != block and is_packed:
            assert (start, stop) == ((found[0], found[-1] + 1) if found else (0, 0))


@pytest.mark.parametrize("of_gradients", [False, True])
@pytest.mark.parametrize("size, kind, is_packed", CASES)
def test_devices_send_what_others_expect(size, kind, is_packed, of_gradients):
    """A row is its number in the block, and the block's: what arrives is what is worked on, or the owner's."""
    _, reached, opened = case(size, kind, is_packed)
    own = [torch.tensor([[block, row] for row in range(len(opened[0][block]))]) for block in range(size)]
    held = own
    for step in range(1, size):
        ways = [counts(reached, place, step, of_gradients) for place in range(size)]
        now = [own[(place - step) % size] for place in range(size)]
        messages = [
            outgoing(own[place], (now if of_gradients else held)[place], 0, reached, place, step, of_gradients)
            for place in range(size)
        ]
        for place, (sent, received) in enumerate(ways):
            assert received == [ways[other][0][place] for other in range(size)] and not sent[place]
            arrived = [m.split(s)[place] for m, (s, _) in zip(messages, ways, strict=True)]
            of = (place + step) % size if of_gradients else place
            block = (of - step) % size
            found = placed(torch.cat(arrived), reached, place, step, of_gradients, 0, len(own[block]))
            start, stop = reached[of, block].tolist()
            assert torch.equal(found[start:stop], own[block][start:stop])
            assert not found[:start].any() and not found[stop:].any()
        held = now
