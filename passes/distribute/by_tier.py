"""All-reduces over several tiers of links in three steps, as they were priced: a reduce-scatter inside the nodes, an
all-reduce of what each device has then across them, an all-gather inside (autopar/cost/hierarchy.py).

Runs on buckets as they are packed, so that what is cut is one flat buffer, padded to the number of devices inside.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import fx

from ..._torch import c10d, rename
from ...cost.hierarchy import Hierarchy, InSteps
from ...cost.moves import Move
from ...ir.graph import bytes_of, operand
from ...ir.mesh import Mesh
from .emit import Builder, Emitter, Group

aten = torch.ops.aten


def by_tier(local: fx.GraphModule, mesh: Mesh, hierarchy: Hierarchy, reduce_scatter: str) -> fx.GraphModule:
    """Put three collectives in the place of each all-reduce that `hierarchy` takes apart, in a local joint graph, in
    place. `reduce_scatter` as for Emitter."""
    emitter = Emitter(Builder(local.graph), mesh, {}, reduce_scatter)
    for start in [n for n in local.graph.nodes if n.target is c10d.all_reduce.default and n.meta.get("collective")]:
        steps = _steps_of(hierarchy, start.meta["collective"].axes, operand(start))
        if steps is not None:
            _replace(start, steps, hierarchy, emitter)
    local.graph.lint()
    local.recompile()
    return local


def _steps_of(hierarchy: Hierarchy, axes: tuple[str, ...], value: fx.Node) -> InSteps | None:
    steps = hierarchy.get(axes)
    return steps if steps is not None and steps.takes(bytes_of(value.meta["val"])) else None


def _replace(start: fx.Node, steps: InSteps, hierarchy: Hierarchy, emitter: Emitter) -> None:
    graph, builder, (wait,) = start.graph, emitter.builder, start.users
    builder.meta = {k: start.meta[k] for k in ("phase", "module", "source", "bucket") if k in start.meta}
    with graph.inserting_before(start):
        reduced = _reduced(operand(start), steps, hierarchy, emitter, start)
    wait.replace_all_uses_with(reduced)
    reduced.meta, name = dict(wait.meta), wait.name
    graph.erase_node(wait)
    graph.erase_node(start)
    rename(reduced, name)


def _reduced(x: fx.Node, steps: InSteps, hierarchy: Hierarchy, emitter: Emitter, start: fx.Node) -> fx.Node:
    """Return the sum, or the maximum, of a value over all axes of `steps`."""
    call, collective, reduction = emitter.call, start.meta["collective"], cast(str, start.args[1])
    shape, devices = list(x.meta["val"].shape), math.prod(map(emitter.mesh.size, steps.inner))

    def group(kind: str, axes: tuple[str, ...]) -> Group:
        count = math.prod(map(emitter.mesh.size, axes))
        move = Move(kind, axes, reduction=reduction)
        return Group(emitter, move, axes, count, collective.tensor, bytes_of(x.meta["val"]))

    elements = math.prod(shape)
    flat = emitter.pad(call(aten.reshape.default, x, [elements]), {0: devices * -(-elements // devices)})
    part = emitter.reduced_blocks(group("reduce_scatter", steps.inner), flat)
    inside = _steps_of(hierarchy, steps.outer, part)
    if inside is None:
        part = group("all_reduce", steps.outer).run(c10d.all_reduce.default, part, reduction)
    else:
        part = _reduced(part, inside, hierarchy, emitter, start)
    whole = group("all_gather", steps.inner).run(c10d.all_gather_into_tensor.default, part, devices)
    return call(aten.reshape.default, emitter.cut(whole, {0: elements}), shape)
