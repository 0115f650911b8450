"""The way of blocks round a ring: who has which when, what is sent, and that outputs of blocks join exactly."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from autopar.ops import autopar
from autopar.ops.ring import ring_of

SIZES = range(1, 10)
LENGTH = 4  # of a block, of which the last one may be shorter
KINDS = {"full": (False, 0, False), "causal": (True, 0, False), "zigzag": (True, 0, True), "short": (True, 3, False),
         "window": (True, 6, False), "wide": (True, 11, False), "both": (False, 6, False),
         "both, wide": (False, 13, False)}  # fmt: skip
RINGS = [*itertools.product(SIZES, KINDS)]


def blocks_of(size: int, zigzag: bool) -> tuple:
    if zigzag:
        half = LENGTH // 2
        return tuple(
            ((r * half, (r + 1) * half), ((2 * size - 1 - r) * half, (2 * size - r) * half)) for r in range(size)
        )
    last = size * LENGTH - 1 if size > 1 else LENGTH
    return tuple(((r * LENGTH, min((r + 1) * LENGTH, last)),) for r in range(size))


def ring_and_mask(size: int, kind: str):
    """Return a ring, and by device and block which keys some query of the device reaches."""
    causal, window, zigzag = KINDS[kind]
    blocks = blocks_of(size, zigzag)
    places = [[place for ends in block for place in range(*ends)] for block in blocks]

    def is_open(query: int, key: int) -> bool:
        return (not causal or key <= query) and (not window or abs(query - key) < window)

    opened = [[[any(is_open(q, k) for q in queries) for k in keys] for keys in places] for queries in places]
    return ring_of(blocks, causal, window, zigzag), opened


@pytest.mark.parametrize("size, kind", RINGS)
def test_rows_are_those_that_the_mask_opens(size, kind):
    """All that some query of a device reaches lie between the first and the last of them; of the own block all are."""
    ring, opened = ring_and_mask(size, kind)
    for place, block in itertools.product(range(size), repeat=2):
        start, stop = ring.rows[place][block]
        of_keys = opened[place][block]
        assert place != block or (start, stop) == (0, len(of_keys))
        assert all(start <= at < stop for at, is_open in enumerate(of_keys) if is_open)
        assert place == block or all(of_keys[start:stop])


@pytest.mark.parametrize("size, kind", RINGS)
def test_every_device_gets_the_rows_that_it_needs_from_one_that_has_them(size, kind):
    ring, _ = ring_and_mask(size, kind)
    for step, place in itertools.product(range(1, size), range(size)):
        assert ring.works(place, step) <= (step in ring.steps)
        source = ring.keys_from(place, step)
        assert (source is None) == (not ring.works(place, step))
        if source is not None:
            assert place in ring.keys_to(source, step)
            own = ring.block(place, step) == source
            assert own or ring.reached(source, step - 1) == ring.reached(place, step)
        assert all(ring.keys_from(to, step) == place for to in ring.keys_to(place, step))


@pytest.mark.parametrize("is_passed_on", [True, False])
@pytest.mark.parametrize("size, kind", RINGS)
def test_gradients_add_up_on_the_way_home(size, kind, is_passed_on):
    """Each device adds its own number to the rows that it works on; the owner ends with all that reach each of them."""
    ring, _ = ring_and_mask(size, kind)
    ring = replace(ring, is_passed_on=is_passed_on)
    travelling: dict[int, tuple[tuple[int, int], set[int]]] = {}
    home = {place: [{place} for _ in range(ring.rows[place][place][1])] for place in range(size)}
    for step in ring.steps[1:]:
        sent: dict[int, list] = {}
        for place in range(size):
            to = ring.gradients_to(place, step)
            if not ring.works(place, step):
                assert to is None
                continue
            rows, found = travelling.pop(place, (ring.reached(place, step), set()))
            assert rows == ring.reached(place, step) and place in ring.gradients_from(to, step)
            sent.setdefault(to, []).append((place, ring.block(place, step), rows, found | {place}))
        assert not travelling, "no gradient is left on the way"
        for to, messages in sent.items():
            assert [m[0] for m in messages] == ring.gradients_from(to, step)
            for _, block, rows, found in messages:
                if block != to:
                    travelling[to] = rows, found
                    continue
                for row in range(*rows):
                    assert not (found & home[to][row]), "nobody adds twice"
                    home[to][row] |= found
    assert not travelling
    for block, found in home.items():
        for row, devices in enumerate(found):
            reach = {p for p in range(size) if ring.rows[p][block][0] <= row < ring.rows[p][block][1]}
            assert devices == reach


@pytest.mark.parametrize("size", SIZES)
def test_halves_in_zigzag_are_those_that_the_mask_opens(size):
    """Keys left out are closed, all others open, but for the own block, which the kernel masks; each other block
    is half of one."""
    blocks = blocks_of(size, True)
    ring = ring_of(blocks, True, zigzag=True)
    for place, step in itertools.product(range(size), repeat=2):
        block, half = ring.block(place, step), LENGTH // 2
        halves, of_keys = ring.open_halves(place, step), range(ring.reached(place, step)[1] // half)
        for row, key in itertools.product((0, 1), repeat=2):
            if place != block:
                is_open = blocks[block][key] < blocks[place][row]
                assert (row in halves and key in of_keys) == is_open
        assert len(halves) * len(of_keys) == (4 if place == block else 2)


@pytest.mark.parametrize("size", [n for n in SIZES if n > 1])
def test_rows_sent_are_those_of_the_formula(size):
    """In a full ring all send P - 1 blocks; in a causal one half of that on average, in zigzag three quarters; of a
    causal window min(n / P, w - 1 - i n / P) rows go to the device i + 1 behind."""
    plain, zigzag = (tuple(blocks_of(size, z)) for z in (False, True))
    plain = (*plain[:-1], (((size - 1) * LENGTH, size * LENGTH),))
    pairs = size * (size - 1)
    for keys, gradients in ((True, False), (False, True)):
        assert ring_of(plain, False).sent_rows(keys, gradients) == [LENGTH * (size - 1)] * size
        assert sum(ring_of(plain, True).sent_rows(keys, gradients)) == LENGTH * pairs // 2
        assert sum(ring_of(zigzag, True, zigzag=True).sent_rows(keys, gradients)) == LENGTH * pairs * 3 // 4
        for window in (1, 2, 5, 6, 9, 20):
            rows = sum((size - i) * min(LENGTH, max(0, window - 1 - (i - 1) * LENGTH)) for i in range(1, size))
            assert sum(ring_of(plain, True, window).sent_rows(keys, gradients)) == rows
    assert ring_of(plain, True, 1).steps == (0,) and ring_of(plain, True, 2).steps == (0, 1)
    assert max(ring_of(plain, True).sent_rows()) == LENGTH * (size - 1)


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
