"""Redistribute from one layout to another: the cheapest order of single moves, each a collective over one axis or a
local slice.

Axes of a dim are ordered, so a move may only take away the innermost axis of a dim or add a new innermost one; anything
else would permute blocks. With b the bytes that a device holds before the move, n the axis size:

    all_gather      S(d) -> R        (n - 1) b      bytes sent by each device (ring); of several axes n is their product
    reduce_scatter  P    -> S(d)     (n - 1) / n b   of several axes n is their product
    all_to_all      S(d) -> S(e)     (n - 1) / n b
    all_reduce      P    -> R        2 (n - 1) / n b   of several axes n is their product
    slice           R    -> S(d)     none, a local copy

The planner prices these moves and the lowering emits exactly them: predicted and emitted collectives are the same list.
Which order is cheapest is asked of links alone: of several axes each sends its share at its own speed, the closest
first, as if every device had a card of its own. What a collective costs is in autopar/cost/collectives.py.
Byte formulas: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from ..hardware.profile import Link
from ..ir.layout import Layout
from ..ir.mesh import Mesh
from .moves import Core, Move, State
from .ways import Step, Ways


@dataclass(frozen=True)
class MoveStep:
    """A move with its price for a tensor of B global bytes, of which a device holds `held` * B before and sends
    `wire_fraction` * B."""

    move: Move
    before: Layout
    after: Layout
    held: float
    wire_fraction: float
    latency_seconds: float
    seconds_per_byte: float


@dataclass(frozen=True)
class Redistribution:
    """All steps from one layout to another; seconds(B) = latency_seconds + seconds_per_byte * B for B global bytes."""

    steps: tuple[MoveStep, ...]

    @cached_property
    def latency_seconds(self) -> float:
        """Return the seconds that all steps take without a byte."""
        return sum(s.latency_seconds for s in self.steps)

    @cached_property
    def seconds_per_byte(self) -> float:
        """Return the seconds of all steps for each global byte."""
        return sum(s.seconds_per_byte for s in self.steps)

    @cached_property
    def wire_fraction(self) -> float:
        """Return the bytes that a device sends in all steps, as a share of the global bytes."""
        return sum(s.wire_fraction for s in self.steps)


class Redistributor:
    """Finds and remembers redistributions on one mesh. `links` by axis; `memory_bytes_per_second` prices slices."""

    def __init__(self, mesh: Mesh, links: dict[str, Link], memory_bytes_per_second: float):
        self.mesh, self.links, self.memory_bytes_per_second = mesh, links, memory_bytes_per_second
        self._found: dict[tuple[Layout, Layout], Redistribution | None] = {}
        self._paths: dict[Core, tuple[Step, ...] | None] = {}
        self._ways: dict[State, Ways] = {}  # by target
        self._prices: dict[tuple, tuple[float, float, float]] = {}
        self._order = {axis: i for i, axis in enumerate(mesh.names)}

    def __call__(self, source: Layout, target: Layout) -> Redistribution | None:
        """Return the cheapest redistribution, None if there is none (nothing becomes partial that was not)."""
        key = (source, target)
        if key not in self._found:
            self._found[key] = self._whole(source, target)
        return self._found[key]

    def path(self, core: Core) -> tuple[Step, ...] | None:
        """Return (move, state after it, share of the elements that a device holds before it) of what moves, as if all
        else were whole; None if nothing leads to the target."""
        if core not in self._paths:
            self._paths[core] = None if core.target.partial else self._ways_to(core.target).path(core.source)
        return self._paths[core]

    def _ways_to(self, target: State) -> Ways:
        if target not in self._ways:
            self._ways[target] = Ways(self.mesh, self.price, target)
        return self._ways[target]

    def share_in_place(self, source: Layout, dims: tuple[int, ...]) -> float:
        """Return the share of the elements that the dims which stay in place leave to a device; `dims` are those that
        move."""
        size = self.mesh.size
        return 1.0 / math.prod(
            [size(axis) for d, axes in enumerate(source.dims) if axes and d not in dims for axis in axes]
        )

    def price(self, kind: str, axes: tuple[str, ...], held: float) -> tuple[float, float, float]:
        """Return (wire fraction, latency in seconds, seconds a global byte) of a move that finds a share `held` on each
        device."""
        key = (kind, axes, held)
        if key not in self._prices:
            self._prices[key] = self._price(kind, axes, held)
        return self._prices[key]

    def _whole(self, source: Layout, target: Layout) -> Redistribution | None:
        core, dims = Core.of(source, target)
        path = self.path(core)
        if path is None:
            return None
        share, before, steps = self.share_in_place(source, dims), source, []
        for move, state, held in path:
            dim, to_dim = (d if d is None else dims[d] for d in (move.dim, move.to_dim))
            after = _embedded(state, dims, source, core)
            wire, latency, per_byte = self.price(move.kind, move.axes, held * share)
            moved = move._replace(dim=dim, to_dim=to_dim)
            steps.append(MoveStep(moved, before, after, held * share, wire, latency, per_byte))
            before = after
        return Redistribution(tuple(steps))

    def _price(self, kind: str, axes: tuple[str, ...], held: float) -> tuple[float, float, float]:
        sizes = [self.mesh.size(a) for a in axes]
        if kind == "slice":
            return 0.0, 0.0, 2 * held / sizes[0] / self.memory_bytes_per_second
        latency = max((self.links[a].latency_seconds for a, n in zip(axes, sizes) if n > 1), default=0.0)
        wire = seconds_per_byte = 0.0
        for axis, n in sorted(zip(axes, sizes), key=lambda pair: -self._order[pair[0]]):  # the closest axis first
            sent = held * {"all_gather": n - 1, "all_reduce": 2 * (n - 1) / n}.get(kind, (n - 1) / n)
            wire += sent
            link = self.links[axis]
            speed = link.all_to_all_bytes_per_second if kind == "all_to_all" else None
            seconds_per_byte += sent / (speed or link.bytes_per_second)
            held = held * n if kind == "all_gather" else held / n
        return wire, latency, seconds_per_byte


def _embedded(state: State, dims: tuple[int, ...], source: Layout, core: Core) -> Layout:
    """Return a state of the core as a layout of the whole tensor."""
    axes, parts = list(source.dims), list(source.parts)
    for d, cut, count in zip(dims, state.dims, state.parts):
        axes[d], parts[d] = cut, count
    in_place = tuple(p for p in source.partial if p not in core.source.partial)
    return Layout(tuple(axes), (*in_place, *state.partial), tuple(parts))
