"""All-reduces over devices that are joined by several tiers of links, one tier after the other.

An all-reduce of B bytes over n nodes of m devices is a reduce-scatter inside each node, an all-reduce of B / m bytes
across the nodes, and an all-gather inside. A ring over all n m devices moves 2 (n m - 1) / (n m) B bytes into each
node, the three steps 2 (n - 1) / n B: a third less for 2 x 2. Which of the two is faster depends on the size, and is
asked of the prices of the steps (autopar/cost/collectives.py); `passes/distribute/by_tier.py` emits what was priced. An
axis that leaves a node is two axes here, `dp//4` across nodes of four and `dp%4` inside.

Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005; Patarasuk and Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..ir.mesh import joined
from ..utils.format import size

Seconds = Callable[[str, tuple[str, ...], Any], Any]  # of a kind of collective, over axes, of bytes held (or an array)

LARGEST_BYTES = 2**34  # of one all-reduce


@dataclass(frozen=True)
class InSteps:
    """All-reduces of `from_bytes` up to `to_bytes` over `outer` and `inner` axes, or parts of axes, go in three steps:
    over the inner ones, the outer ones, and the inner ones again. `inner` are on one tier; `outer` may have steps of
    their own."""

    outer: tuple[str, ...]
    inner: tuple[str, ...]
    from_bytes: int
    to_bytes: int

    @property
    def axes(self) -> tuple[str, ...]:
        """Return the axes that the all-reduce is over, in the order of the mesh."""
        return joined(self.outer + self.inner)

    def takes(self, bytes_: float) -> bool:
        """Return whether an all-reduce of so many bytes goes in steps."""
        return self.from_bytes <= bytes_ <= self.to_bytes

    def __str__(self) -> str:
        outer, inner = ",".join(self.outer), ",".join(self.inner)
        from_ = size(self.from_bytes)
        up_to = "" if self.to_bytes == LARGEST_BYTES else f" up to {size(self.to_bytes)}"
        return (
            f"all-reduces over {','.join(self.axes)} go by tier from {from_}{up_to}: reduce-scatter over {inner}, "
            f"all-reduce over {outer}, all-gather over {inner}"
        )


Hierarchy = Mapping[tuple[str, ...], InSteps]  # by axes in the order of the mesh


def inner_axes(axes: Sequence[str], tier_of: Mapping[str, object]) -> tuple[str, ...]:
    """Return the last of these axes, as many as are on the tier of the very last; all if there is one tier."""
    return tuple(reversed([*itertools.takewhile(lambda axis: tier_of[axis] == tier_of[axes[-1]], reversed(axes))]))


def step_seconds(outer: tuple[str, ...], inner: tuple[str, ...], devices_inside: int, seconds: Seconds, held):
    """Return the seconds of an all-reduce of `held` bytes, a number or an array, in three steps."""
    part = held / devices_inside
    return (
        seconds("reduce_scatter", inner, held) + seconds("all_reduce", outer, part) + seconds("all_gather", inner, part)
    )


def in_steps(
    outer: tuple[str, ...],
    inner: tuple[str, ...],
    devices_inside: int,
    flat: Callable[[float], float],
    seconds: Seconds,
) -> InSteps | None:
    """Return for which bytes the three steps are faster than `flat`, one ring over all axes; None if for none. They are
    the first run of sizes, in powers of two, with its ends to the byte."""

    def gains(held: int) -> bool:
        return step_seconds(outer, inner, devices_inside, seconds, held) < flat(held)

    sizes = [2**i for i in range(8, LARGEST_BYTES.bit_length())]
    run = [*itertools.takewhile(gains, itertools.dropwhile(lambda held: not gains(held), sizes))]
    if not run:
        return None
    first, last = run[0], run[-1]
    if first > sizes[0]:
        first = _crossing(first // 2, first, gains)
    if last < sizes[-1]:
        last = _crossing(2 * last, last, gains)
    return InSteps(outer, inner, first, last)


def _crossing(outside: int, inside: int, holds: Callable[[int], bool]) -> int:
    """Return the number next to one that does not hold, between one that does not and one that does."""
    while abs(inside - outside) > 1:
        middle = (outside + inside) // 2
        outside, inside = (outside, middle) if holds(middle) else (middle, inside)
    return inside
