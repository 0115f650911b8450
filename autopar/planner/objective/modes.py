"""List the modes in which a tensor is served to those who read it: the one statement of what that costs, in seconds and
in bytes that wait.

A tensor is made in a layout p. Each other layout q in which it is read is a copy, made in one of three ways. With early
and late the seconds from p to q in the forward and in the backward, and m passes of a step:

    MAKE  in each phase that reads it                              early, late, or both
    KEEP  in the forward, and kept for the backward                early + price * bytes(q)
    ONCE  before the first pass, and kept to the end of the step   early / m + price * bytes(q)

All copies of a tensor are served in one of these modes, and the cheapest is the one that counts:

    SAVED   the tensor itself waits for the backward too           price * bytes(p); nothing if it is there anyway
    GONE    kept copies alone wait

Leaves are there anyway, and so is what its producer makes again in the backward. What else decides is which ways there
are: copies of a parameter are all made again (ZeRO-3) or all kept (ZeRO-1 and 2) if a recipe says so, and only those
that micro-batches of a pipeline share are made once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...ir.layout import Layout
from ..problem.vertices import Vertex

FORWARD, BACKWARD = 1, 2  # phases that read a copy, as bits
BOTH = FORWARD | BACKWARD
MAKE, KEEP, ONCE = "make", "keep", "once"
RESIDENT_LEAVES = (  # their base never has to be saved
    "parameter", "buffer", "input", "constant", "tangent", "cotangent", "random",
)  # fmt: skip
Amount = float | np.ndarray


@dataclass(frozen=True)
class Mode:
    """Says whether the tensor itself waits for the backward, and, by the phases that read a copy, the ways in which the
    copy may be made; of equally cheap ones the first is taken."""

    saves_base: bool
    ways: Mapping[int, tuple[str, ...]]


def _mode(forward: tuple[str, ...], both: tuple[str, ...]) -> Mode:
    return Mode(True, {FORWARD: forward, BACKWARD: (MAKE,), BOTH: both})


SAVED = _mode((MAKE,), (KEEP, MAKE))
GONE = Mode(False, {FORWARD: (MAKE,), BACKWARD: (), BOTH: (KEEP,)})
MADE_TWICE = _mode((MAKE,), (MAKE,))
OF_PARAMETERS = {None: SAVED, True: _mode((MAKE,), (KEEP,)), False: MADE_TWICE}  # by what a recipe says of their copies
OF_SHARED_PARAMETERS = {None: _mode((ONCE, MAKE), (ONCE, MAKE)), True: _mode((ONCE,), (ONCE,)), False: MADE_TWICE}


def waits(v: Vertex) -> bool:
    """Return whether what the backward reads of a vertex is held for it: what the forward makes, copies of parameters
    included. Copies of other leaves are small, and what the backward makes it does not wait for."""
    return v.phase == "forward" and (v.kind == "parameter" or v.kind not in RESIDENT_LEAVES)


def modes_of(v: Vertex, gathers_once: bool, keep_parameters: bool | None) -> tuple[Mode, ...]:
    """Return the modes in which a vertex's tensors may be served, of equally cheap ones the first is taken.
    `gathers_once`: whether the passes of a step share copies of parameters; `keep_parameters`: what a recipe says of
    those (None: nothing)."""
    if v.kind == "parameter":
        return ((OF_SHARED_PARAMETERS if gathers_once else OF_PARAMETERS)[keep_parameters],)
    return (GONE, SAVED) if waits(v) else (SAVED,)


def cost(way: str, phases: int, early: Amount, late: Amount, once: Amount, held: Amount) -> Amount:
    """Return what one copy costs that is read in these phases, made in this way: seconds of an average pass (`once` if
    one pass alone makes it), and `held`, the price of its bytes, where they wait."""
    if way == MAKE:
        return early + late if phases == BOTH else early if phases == FORWARD else late
    return (once if way == ONCE else early) + held


@dataclass(frozen=True)
class Copy:
    """A copy that is read in some phases, with its seconds in either and the price of its bytes."""

    phases: int
    early: float
    late: float
    once: float
    held: float


def cheapest(
    modes: tuple[Mode, ...], copies: Mapping[Layout, Copy], base: float, reads_base: bool
) -> dict[Layout, str]:
    """Return the way of every copy in the cheapest mode. `base`: the price of the bytes of the tensor itself, which the
    backward reads as it is if `reads_base`."""
    best, least = {}, math.inf
    for mode in modes:
        if not mode.saves_base and (reads_base or any(not mode.ways[c.phases] for c in copies.values())):
            continue
        ways, total = {}, base if mode.saves_base else 0.0
        for q, c in copies.items():
            costs = {way: cost(way, c.phases, c.early, c.late, c.once, c.held) for way in mode.ways[c.phases]}
            ways[q] = min(costs, key=costs.get)
            total += costs[ways[q]]
        if not best or total < least:
            best, least = ways, total
    return best
