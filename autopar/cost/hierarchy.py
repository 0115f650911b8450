"""Collectives over devices that are joined by several tiers of links, one tier after the other.

Of n nodes of m devices, B the bytes of a whole tensor:

    all_reduce      a reduce-scatter inside each node, an all-reduce of B / m across the nodes, an all-gather inside
    all_gather      of the devices at one place in their nodes, across the nodes; then of those of a node, inside
    reduce_scatter  inside each node; then across the nodes, of B / m

A ring over all n m devices moves 2 (n m - 1) / (n m) B bytes into each node for an all-reduce, the three steps
2 (n - 1) / n B: a third less for 2 x 2. The others move half of that either way, and far more where they are an
all-to-all or broadcasts. Gathers by tier bring the blocks of one place in all nodes together, reduce-scatters want them
so: a copy puts them in order, which is the one that takes them out of their bucket or into it, if there is one.

Which way is faster depends on the size, and is asked of the prices of the steps (autopar/cost/collectives.py);
`passes/distribute/by_tier.py` emits what was priced. An axis that leaves a node is two axes here, `dp//4` across nodes
of four and `dp%4` inside.

Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005; Patarasuk and Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..ir.mesh import Mesh, joined
from ..utils.format import size

Seconds = Callable[[str, tuple[str, ...], Any], Any]  # of a kind of collective, over axes, of bytes held (or an array)
Key = tuple[str, tuple[str, ...]]  # kind of a collective, axes in the order of the mesh

LARGEST_BYTES = 2**34  # of one collective
STEPS = {  # of a collective over all axes: (kind, whether it is over the outer ones)
    "all_reduce": (("reduce_scatter", False), ("all_reduce", True), ("all_gather", False)),
    "all_gather": (("all_gather", True), ("all_gather", False)),
    "reduce_scatter": (("reduce_scatter", False), ("reduce_scatter", True)),
}


@dataclass(frozen=True)
class InSteps:
    """Collectives of a `kind` over `outer` and `inner` axes, or parts of axes, of which a device holds `from_bytes` up
    to `to_bytes` before, go in the kind's STEPS. `inner` are on one tier; `outer` may have steps of their own."""

    kind: str
    outer: tuple[str, ...]
    inner: tuple[str, ...]
    from_bytes: int
    to_bytes: int

    @property
    def axes(self) -> tuple[str, ...]:
        """Return the axes that the collective is over, in the order of the mesh."""
        return joined(self.outer + self.inner)

    @property
    def steps(self) -> tuple[Key, ...]:
        """Return the steps, in order."""
        return tuple((kind, self.outer if is_outer else self.inner) for kind, is_outer in STEPS[self.kind])

    def takes(self, bytes_):
        """Return whether a collective goes in steps of which a device holds so many bytes before, a number or an
        array."""
        return (bytes_ >= self.from_bytes) & (bytes_ <= self.to_bytes)

    def __str__(self) -> str:
        up_to = "" if self.to_bytes == LARGEST_BYTES else f" up to {size(self.to_bytes)}"
        steps = ", ".join(_words(*step) for step in self.steps)
        return f"{_words(self.kind + 's', self.axes)} go by tier from {size(self.from_bytes)}{up_to}: {steps}"


def _words(kind: str, axes: tuple[str, ...]) -> str:
    return f"{kind.replace('_', '-')} over {','.join(axes)}"


Hierarchy = Mapping[Key, InSteps]


def tiers_of(hierarchy: Hierarchy, key: Key, held_bytes: float, mesh: Mesh) -> list[tuple[str, ...]]:
    """Return the axes of each tier that an all_gather or a reduce_scatter of so many bytes goes over, the outermost
    first; all at once where it does not go by tier."""
    steps = hierarchy.get(key)
    if steps is None or not steps.takes(held_bytes):
        return [key[1]]
    inside = math.prod(map(mesh.size, steps.inner)) if steps.kind == "reduce_scatter" else 1
    return [*tiers_of(hierarchy, (steps.kind, steps.outer), held_bytes / inside, mesh), steps.inner]


def inner_axes(axes: Sequence[str], tier_of: Mapping[str, object]) -> tuple[str, ...]:
    """Return the last of these axes, as many as are on the tier of the very last; all if there is one tier."""
    return tuple(reversed([*itertools.takewhile(lambda axis: tier_of[axis] == tier_of[axes[-1]], reversed(axes))]))


def step_seconds(steps: tuple[Key, ...], devices_of: Callable[[tuple[str, ...]], int], seconds: Seconds, held):
    """Return the seconds of all these steps, the first of which finds `held` bytes, a number or an array."""
    total = 0.0
    for kind, axes in steps:
        total = total + seconds(kind, axes, held)
        held = held * {"all_gather": devices_of(axes), "reduce_scatter": 1 / devices_of(axes)}.get(kind, 1)
    return total


def sizes_that_gain(gains: Callable[[int], bool]) -> tuple[int, int] | None:
    """Return from how many bytes up to how many something gains; None if it never does. They are the first run of
    sizes, in powers of two, with its ends to the byte."""
    sizes = [2**i for i in range(8, LARGEST_BYTES.bit_length())]
    run = [*itertools.takewhile(gains, itertools.dropwhile(lambda held: not gains(held), sizes))]
    if not run:
        return None
    first, last = run[0], run[-1]
    if first > sizes[0]:
        first = _crossing(first // 2, first, gains)
    if last < sizes[-1]:
        last = _crossing(2 * last, last, gains)
    return first, last


def _crossing(outside: int, inside: int, holds: Callable[[int], bool]) -> int:
    """Return the number next to one that does not hold, between one that does not and one that does."""
    while abs(inside - outside) > 1:
        middle = (outside + inside) // 2
        outside, inside = (outside, middle) if holds(middle) else (middle, inside)
    return inside
