"""Collectives over several tiers of links in steps, each over one tier, as priced (autopar/cost/hierarchy.py).

An all-reduce is a reduce-scatter inside the nodes, an all-reduce of what each device has then across them, an
all-gather inside. An all-gather goes across, then inside; a reduce-scatter inside, then across.

Runs on buckets as they are packed. Blocks of a gather come as (inside, across, block) and belong in the order of the
ranks, (across, inside, block); a reduce-scatter wants them the other way round. The copy that takes tensors out of a
bucket of gathers, or into one of reductions, reads or writes its columns through a permuted view, and so puts them in
order. A tensor that travels alone is copied once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import fx

from ..._torch import c10d
from ...cost.hierarchy import Hierarchy, InSteps, tiers_of
from ...cost.moves import Move
from ...ir.graph import bytes_of, operand
from ...ir.mesh import Mesh
from . import bucket
from .emit import Builder, Emitter, Group, contiguous

aten = torch.ops.aten
KINDS = {
    c10d.all_reduce.default: "all_reduce",
    c10d.all_gather_into_tensor.default: "all_gather",
    c10d.reduce_scatter_tensor.default: "reduce_scatter",
}
Axes = tuple[str, ...]


def by_tier(local: fx.GraphModule, mesh: Mesh, hierarchy: Hierarchy, reduce_scatter: str) -> fx.GraphModule:
    """Put several collectives in the place of each that `hierarchy` takes apart, in a local joint graph, in place. All
    reduce-scatters are native before, and as `reduce_scatter` says after (see Emitter). What is made of one collective
    has its name in meta["by_tier"]."""
    emitter = Emitter(Builder(local.graph), mesh, {}, reduce_scatter)
    for start in [n for n in local.graph.nodes if n.target in KINDS and n.meta.get("collective")]:
        key, sent = (KINDS[start.target], start.meta["collective"].axes), bytes_of(operand(start).meta["val"])
        steps, tiers = hierarchy.get(key), tiers_of(hierarchy, key, sent, mesh)
        is_exchange = key[0] == "reduce_scatter" and reduce_scatter != "native"
        if is_exchange or steps is not None and steps.takes(sent):
            _Whole(start, hierarchy, emitter).replace(steps, tiers)
    local.graph.eliminate_dead_code()
    local.graph.lint()
    local.recompile()
    return local


@dataclass(frozen=True)
class _Whole:
    """A collective that others take the place of."""

    start: fx.Node
    hierarchy: Hierarchy
    emitter: Emitter

    def replace(self, steps: InSteps | None, tiers: Sequence[Axes]) -> None:
        """Put one collective after the other in its place: the `steps` of an all-reduce, or one over each of `tiers`,
        the outermost first."""
        start, builder, x = self.start, self.emitter.builder, operand(self.start)
        builder.meta = {k: start.meta[k] for k in ("phase", "module", "source", "bucket") if k in start.meta}
        builder.meta["by_tier"] = start.name
        with start.graph.inserting_before(start):
            if start.target is c10d.all_gather_into_tensor.default:
                result = self._gathered(x, tiers)
            elif start.target is c10d.reduce_scatter_tensor.default:
                result = self._scattered(x, tiers)
            else:
                result = self._reduced(x, cast(InSteps, steps))
        (wait,) = start.users
        if result is None:
            start.graph.erase_node(wait)
        else:
            bucket.become(wait, result)
        start.graph.erase_node(start)

    def _gathered(self, x: fx.Node, tiers: Sequence[Axes]) -> fx.Node | None:
        """Gather over the outermost tier first, and return the blocks in order; None if they are read from a bucket."""
        call, sizes = self.emitter.call, [self._devices(axes) for axes in tiers]
        y = x
        for axes, devices in zip(tiers, sizes):
            y = self._group("all_gather", axes, y).run(c10d.all_gather_into_tensor.default, y, devices)
        y = _turned(self.emitter, call(aten.reshape.default, y, [*sizes[::-1], *x.meta["val"].shape]), len(sizes))
        if self.start.meta.get("bucket"):
            bucket.read_columns(self.start, y, self.emitter.builder)
            return None
        shape = [math.prod(sizes) * x.meta["val"].shape[0], *x.meta["val"].shape[1:]]
        return contiguous(self.emitter.builder, call(aten.reshape.default, y, shape))

    def _scattered(self, x: fx.Node, tiers: Sequence[Axes]) -> fx.Node:
        """Put the blocks in order, and reduce over the innermost tier first."""
        call, sizes, shape = self.emitter.call, [self._devices(axes) for axes in tiers], list(x.meta["val"].shape)

        def turned(rows: fx.Node) -> fx.Node:
            rest = [shape[0] // math.prod(sizes), *rows.meta["val"].shape[1:]]
            return _turned(self.emitter, call(aten.reshape.default, rows, [*sizes, *rest]), len(sizes))

        if len(tiers) > 1:
            rows = bucket.rows_of(self.start)
            x = call(aten.cat.default, [turned(row) for row in rows], len(sizes) + 1) if rows else turned(x)
            x = call(aten.reshape.default, contiguous(self.emitter.builder, x), shape)
        for axes in reversed(tiers):
            x = self.emitter.reduced_blocks(self._group("reduce_scatter", axes, x), x)
        return x

    def _reduced(self, x: fx.Node, steps: InSteps) -> fx.Node:
        """Return the sum, or the maximum, of a value over all axes of `steps`."""
        call, shape, devices = self.emitter.call, list(x.meta["val"].shape), self._devices(steps.inner)
        elements = math.prod(shape)
        flat = self.emitter.pad(call(aten.reshape.default, x, [elements]), {0: devices * -(-elements // devices)})
        part = self.emitter.reduced_blocks(self._group("reduce_scatter", steps.inner, x), flat)
        inside = self.hierarchy.get(("all_reduce", steps.outer))
        if inside is not None and inside.takes(bytes_of(part.meta["val"])):
            part = self._reduced(part, inside)
        else:
            group = self._group("all_reduce", steps.outer, part)
            part = group.run(c10d.all_reduce.default, part, group.move.reduction)
        group = self._group("all_gather", steps.inner, part)
        whole = group.run(c10d.all_gather_into_tensor.default, part, devices)
        return call(aten.reshape.default, self.emitter.cut(whole, {0: elements}), shape)

    def _group(self, kind: str, axes: Axes, x: fx.Node) -> Group:
        reduction = "sum" if kind == "all_gather" else cast(str, self.start.args[1])
        tensor, move = self.start.meta["collective"].tensor, Move(kind, axes, reduction=reduction)
        return Group(self.emitter, move, axes, self._devices(axes), tensor, bytes_of(x.meta["val"]))

    def _devices(self, axes: Axes) -> int:
        return math.prod(map(self.emitter.mesh.size, axes))


def _turned(emitter: Emitter, x: fx.Node, count: int) -> fx.Node:
    """Return a view with the first `count` dims in reverse order."""
    order = [*reversed(range(count)), *range(count, x.meta["val"].dim())]
    return emitter.call(aten.permute.default, x, order)
