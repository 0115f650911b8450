"""Count the places more or fewer than a size in the lengths of its shards, and in where they begin: of 7 over 2 devices
the blocks are (7 + 1) / 2 and (7 - 1) / 2."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from ..codegen.follow_size import NEAR, SHIFTS

Shifts = frozenset[Fraction]


def shifts_of(size: int, ways: Sequence[int], pieces: int = 1) -> Shifts:
    """Return the shifts of a size that may be cut into `pieces`, and each of these over axes of so many devices,
    in any order; also those of sizes that have a few more or fewer places."""
    found = {few + shift for few in (0, *SHIFTS) for shift in {Fraction(0), *_of_shards(size + few, ways, pieces)}}
    return frozenset(found - {0})


def least_of(size: int, ways: Sequence[int], pieces: int = 1) -> Fraction:
    """Return the least size at which lines with the shifts of shards are told from other curves."""
    return max(map(abs, _of_shards(size, ways, pieces)), default=Fraction(0)) / NEAR


def _of_shards(size: int, ways: Sequence[int], pieces: int) -> Shifts:
    period = pieces * math.prod(ways)
    size += period**2  # of all sizes that leave these remainders, also where the last block of this one is empty
    rest = size % pieces
    parts = {(pieces, -rest), (pieces, pieces - rest)} if rest else {(pieces, 0)}
    found: set[Fraction] = set()
    for divisor, shift in {(1, 0), *parts}:
        _cut(size, divisor, shift, (Fraction(0), Fraction(0)), tuple(ways), found)
    return frozenset(found)


def _cut(
    size: int, divisor: int, shift: int, start: tuple[Fraction, Fraction], ways: tuple[int, ...], found: set[Fraction]
) -> None:
    """Add the shifts of a length (size + shift) / divisor that begins at start[0] * size + start[1], and of its blocks:
    ceil(length / n), the last shorter."""
    found.add(Fraction(shift))
    if start[0]:
        found.add(start[1] / start[0])
    length = (size + shift) // divisor
    for at, n in enumerate(ways):
        missing = -length % n
        block, more = divisor * n, divisor * missing
        for k in range(n):
            own = more if k < n - 1 else -(n - 1) * more
            begins = start[0] + Fraction(k, block), start[1] + Fraction(k * (shift + more), block)
            _cut(size, block, shift + own, begins, ways[:at] + ways[at + 1 :], found)
