"""From one layout to another: the cheapest order of single moves, each a collective over one axis or a local slice.

Axes of a dim are ordered, so a move may only take away the innermost axis of a dim or add a new innermost one; anything
else would permute blocks. With b the bytes that a device holds before the move, n the axis size:

    all_gather      S(d) -> R        (n - 1) b      bytes sent by each device (ring)
    reduce_scatter  P    -> S(d)     (n - 1) / n b
    all_to_all      S(d) -> S(e)     (n - 1) / n b
    all_reduce      P    -> R        2 (n - 1) / n b; over several axes the inner one first, the outer on 1/n of it
    slice           R    -> S(d)     none, a local copy

The planner prices these moves and the lowering emits exactly them: predicted and emitted collectives are the same list.
Byte formulas: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ..hardware import Link
from ..layout import Layout
from ..mesh import Mesh

REFERENCE_BYTES = 16 * 2**20  # global bytes at which the order of moves is chosen, for every tensor alike


@dataclass(frozen=True)
class Move:
    """One step. `axes` has one axis except for an all_reduce over several. `dim` is cut or joined; all_to_all joins
    `dim` and cuts `to_dim`. `parts` of the dim that is cut or joined (see Layout)."""

    kind: str
    axes: tuple[str, ...]
    dim: int | None = None
    to_dim: int | None = None
    reduction: str = "sum"
    parts: int = 1
    to_parts: int = 1

    def __str__(self) -> str:
        where = {"all_to_all": f" S({self.dim})->S({self.to_dim})", "all_reduce": f" {self.reduction}"}
        return f"{self.kind}[{','.join(self.axes)}]" + where.get(self.kind, f" S({self.dim})")


@dataclass(frozen=True)
class Step:
    """A move with its price for a tensor of B global bytes: `wire_fraction` * B bytes sent by each device."""

    move: Move
    before: Layout
    after: Layout
    wire_fraction: float
    latency_seconds: float
    seconds_per_byte: float


@dataclass(frozen=True)
class Redistribution:
    """All steps from one layout to another; seconds(B) = latency_seconds + seconds_per_byte * B for B global bytes."""

    steps: tuple[Step, ...]

    @cached_property
    def latency_seconds(self) -> float:
        return sum(s.latency_seconds for s in self.steps)

    @cached_property
    def seconds_per_byte(self) -> float:
        return sum(s.seconds_per_byte for s in self.steps)

    @cached_property
    def wire_fraction(self) -> float:
        return sum(s.wire_fraction for s in self.steps)


class Redistributor:
    """Finds and remembers redistributions on one mesh. `links` by axis; `memory_bytes_per_second` prices slices."""

    def __init__(self, mesh: Mesh, links: dict[str, Link], memory_bytes_per_second: float):
        self.mesh, self.links, self.memory_bytes_per_second = mesh, links, memory_bytes_per_second
        self._known: dict[tuple[Layout, Layout], Redistribution | None] = {}

    def __call__(self, source: Layout, target: Layout) -> Redistribution | None:
        """The cheapest redistribution, None if there is none (nothing becomes partial that was not)."""
        key = (source, target)
        if key not in self._known:
            self._known[key] = self._search(source, target)
        return self._known[key]

    def _search(self, source: Layout, target: Layout) -> Redistribution | None:
        if source == target:
            return Redistribution(())
        if any(source.reduction_of(axis) != op for axis, op in target.partial):
            return None
        order = itertools.count()
        queue: list = [(0.0, next(order), source, ())]
        done = set()
        while queue:
            seconds, _, layout, steps = heapq.heappop(queue)
            if layout == target:
                return Redistribution(steps)
            if layout in done:
                continue
            done.add(layout)
            for step in self._steps(layout, target):
                price = step.latency_seconds + step.seconds_per_byte * REFERENCE_BYTES
                heapq.heappush(queue, (seconds + price, next(order), step.after, (*steps, step)))
        return None

    def _steps(self, layout: Layout, target: Layout) -> Iterator[Step]:
        share = 1.0 / math.prod(self.mesh.size(a) for a in layout.sharding_axes)  # of the global bytes, held before
        for axis, reduction in layout.partial:
            if target.reduction_of(axis):
                continue
            without = tuple(p for p in layout.partial if p[0] != axis)
            reduced = replace(layout, partial=without)
            yield self._step("all_reduce", (axis,), layout, reduced, share, reduction=reduction)
            d = target.dim_of(axis)
            if d is not None and reduction == "sum" and self._may_append(layout, target, d, axis):
                after = _with_axis(reduced, target, d, axis)
                yield self._step("reduce_scatter", (axis,), layout, after, share, dim=d, parts=target.parts[d])
        ending = [a for a in self.mesh.names if layout.reduction_of(a) and not target.reduction_of(a)]
        for reduction in ("sum", "max"):
            axes = tuple(a for a in ending if layout.reduction_of(a) == reduction)
            if len(axes) > 1:
                rest = tuple(p for p in layout.partial if p[0] not in axes)
                yield self._step("all_reduce", axes, layout, replace(layout, partial=rest), share, reduction=reduction)
        for d, axes in enumerate(layout.dims):
            if not axes or self._settled(layout, target, d):
                continue
            axis, gathered = axes[-1], _without_innermost(layout, d)
            yield self._step("all_gather", (axis,), layout, gathered, share, dim=d, parts=layout.parts[d])
            e = target.dim_of(axis)
            if e is not None and e != d and self._may_append(layout, target, e, axis):
                after = _with_axis(gathered, target, e, axis)
                yield self._step(
                    "all_to_all", (axis,), layout, after, share,
                    dim=d, to_dim=e, parts=layout.parts[d], to_parts=target.parts[e],
                )  # fmt: skip
        busy = {*layout.sharding_axes, *(a for a, _ in layout.partial)}
        for d, axes in enumerate(target.dims):
            for axis in axes:
                if axis not in busy and self._may_append(layout, target, d, axis):
                    after = _with_axis(layout, target, d, axis)
                    yield self._step("slice", (axis,), layout, after, share, dim=d, parts=target.parts[d])

    def _settled(self, layout: Layout, target: Layout, d: int) -> bool:
        """Whether dim d already starts as the target wants it: its axes need not move."""
        wanted = target.dims[d][: len(layout.dims[d])]
        return layout.dims[d] == wanted and layout.parts[d] == target.parts[d]

    def _may_append(self, layout: Layout, target: Layout, d: int, axis: str) -> bool:
        """Whether adding `axis` as innermost axis of dim d leads towards the target."""
        if layout.dims[d] and layout.parts[d] != target.parts[d]:
            return False
        longer = (*layout.dims[d], axis)
        return target.dims[d][: len(longer)] == longer

    def _step(self, kind, axes, before, after, share, **fields) -> Step:
        sizes = [self.mesh.size(a) for a in axes]
        if kind == "slice":
            return Step(Move(kind, axes, **fields), before, after, 0.0, 0.0,
                        2 * share / sizes[0] / self.memory_bytes_per_second)  # fmt: skip
        wire = seconds_per_byte = 0.0
        held = share
        for axis, n in zip(reversed(axes), reversed(sizes)):  # the last axis is the closest: reduce there first
            sent = held * {"all_gather": n - 1, "all_reduce": 2 * (n - 1) / n}.get(kind, (n - 1) / n)
            wire += sent
            link = self.links[axis]
            speed = link.all_to_all_bytes_per_second if kind == "all_to_all" else None
            seconds_per_byte += sent / (speed or link.bytes_per_second)
            held /= n
        latency = max((self.links[a].latency_seconds for a, n in zip(axes, sizes) if n > 1), default=0.0)
        return Step(Move(kind, axes, **fields), before, after, wire, latency, seconds_per_byte)


def _without_innermost(layout: Layout, d: int) -> Layout:
    dims, parts = list(layout.dims), list(layout.parts)
    dims[d] = dims[d][:-1]
    if not dims[d]:
        parts[d] = 1
    return Layout(tuple(dims), layout.partial, tuple(parts))


def _with_axis(layout: Layout, target: Layout, d: int, axis: str) -> Layout:
    dims, parts = list(layout.dims), list(layout.parts)
    dims[d], parts[d] = (*dims[d], axis), target.parts[d]
    return Layout(tuple(dims), layout.partial, tuple(parts))
