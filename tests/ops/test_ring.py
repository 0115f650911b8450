"""The way of blocks round a ring: who has which when, what is sent, and that outputs of blocks join exactly."""

from __future__ import annotations

import itertools

import pytest
import torch

from autopar.ops import autopar
from autopar.ops.ring import Ring

SIZES = range(1, 10)


KINDS = [(False, False), (True, False), (True, True)]  # causal, in zigzag


@pytest.mark.parametrize("size, kind", itertools.product(SIZES, KINDS))
def test_every_device_has_every_block_that_it_needs_once(size, kind):
    ring, held = Ring(size, *kind), {place: place for place in range(size)}
    seen = {place: [] for place in range(size)}
    for step in range(size):
        for place in range(size):
            if (block := ring.block(place, step)) is not None:
                assert held[place] == block, "it is there when it is needed"
                seen[place].append(block)
        moved = {ring.keys_to(place, step): held[place] for place in range(size)}
        assert {p for p in range(size) if ring.keys_from(p, step) is not None} == {*moved} - {None}
        held |= {to: block for to, block in moved.items() if to is not None}
    for place, blocks in seen.items():
        assert sorted(blocks) == [*range(place + 1 if kind == (True, False) else size)]


@pytest.mark.parametrize("size, kind", itertools.product(SIZES, KINDS))
def test_gradients_add_up_on_the_way_home(size, kind):
    """Each device adds its own number to the block that it works on; the owner ends with all that need it."""
    ring = Ring(size, *kind)
    travelling: dict[int, set[int]] = {}
    home = {place: {place} for place in range(size)}
    for step in range(size):
        sent = {}
        for place in range(size):
            block = ring.block(place, step)
            if block is None or step == 0:
                assert ring.gradients_to(place, step) is None
                continue
            found = travelling.pop(place, set()) | {place}
            assert not (found & home[block]), "nobody adds twice"
            to = ring.gradients_to(place, step)
            assert place in ring.gradients_from(to, step)
            sent.setdefault(to, []).append((place, block, found))
        assert not travelling, "no gradient is left on the way"
        for to, messages in sent.items():
            assert [m[0] for m in messages] == ring.gradients_from(to, step)
            for _, block, found in messages:
                if block == to:
                    home[to] |= found
                else:
                    travelling[to] = found
    assert not travelling
    for block, found in home.items():
        assert found == {*range(block if kind == (True, False) else 0, size)}


@pytest.mark.parametrize("size", SIZES)
def test_halves_in_zigzag_are_those_that_the_mask_opens(size):
    """Device r has blocks r and 2 P - 1 - r of 2 P. What is left out is closed, what is not is open, but for the own
    block, which the kernel masks; each other block is half of one."""
    ring = Ring(size, True, True)
    for place, step in itertools.product(range(size), repeat=2):
        block = ring.block(place, step)
        rows, keys = ([at, 2 * size - 1 - at] for at in (place, block))
        halves, of_keys = ring.open_halves(place, step)
        opened = {(row, key) for row in halves for key in of_keys}
        for row, key in itertools.product((0, 1), repeat=2):
            if place != block:
                assert ((row, key) in opened) == (keys[key] < rows[row])
        assert len(opened) == (4 if place == block else 2)


@pytest.mark.parametrize("size", [n for n in SIZES if n > 1])
def test_messages(size):
    """In a full ring all send P - 1 blocks; in a causal one half of that on average, as nobody gets what is closed."""
    for causal in (False, True):
        ring = Ring(size, causal)
        for to in (ring.keys_to, ring.gradients_to):
            sent = [sum(to(place, step) is not None for step in range(size)) for place in range(size)]
            assert max(sent) == ring.most_sent == size - 1
            assert sum(sent) == size * (size - 1) // (2 if causal else 1)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_joined_blocks_are_the_whole(dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 12, 8, generator=generator, dtype=torch.float64).to(dtype) for h in (4, 2, 2))
    mask = torch.rand(2, 1, 12, 12, generator=generator) < 0.5
    mask[0, 0, 3] = False  # a query that may attend to nothing
    wanted = autopar.attention(q, k, v, mask, False, None)
    joined = None
    for start, stop in itertools.pairwise((0, 5, 6, 12)):
        block = k[:, :, start:stop], v[:, :, start:stop], mask[..., start:stop]
        found = autopar.attention(q, *block, False, None)
        joined = found if joined is None else autopar.join_attention(*joined, *found, stop == 12)
    assert joined[0].dtype == dtype and joined[0].stride() == wanted[0].stride()
    for mine, whole in zip(joined, wanted, strict=True):
        torch.testing.assert_close(mine, whole, rtol=tolerance, atol=tolerance)
