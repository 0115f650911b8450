"""One redistribution step as nodes of a local graph: a functional collective and the reshapes around it.

Collectives work on dim 0, so a dim d > 0 is first *stacked*: its n blocks are put one after the other on dim 0; the
inverse, *unstacking*, joins blocks that lie on dim 0 into dim d. Both are a fixed number of views and one copy
whatever n is, so the graph does not grow with the number of devices.

Blocks are padded to the longest of their group, ceil(size / n), and the padding is cut off afterwards; where there is
nothing to pad no node is made. So graphs of different ranks may differ in local nodes but have the same collectives.

A group is written as the names of its mesh axes, "dp" or "dp,tp"; codegen.bind_groups puts in process groups.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from ..._torch import c10d, fake_mode, rename
from ...cost.redistribute import Move, MoveStep
from ...ir.graph import bytes_of
from ...ir.layout import ZIGZAG, chunk, dim_ranges, local_shape
from ...ir.mesh import Mesh
from .local_values import local_value

aten = torch.ops.aten


@dataclass(frozen=True)
class Collective:
    """The metadata of a collective node. `kind` as in Move; `wire_bytes` are sent by this device (ring); `tensor` is
    the global tensor's name; `phase` is "forward" or "backward"."""

    kind: str
    axes: tuple[str, ...]
    wire_bytes: float
    tensor: str
    phase: str

    def __str__(self) -> str:
        return f"{self.kind}[{','.join(self.axes)}] of {self.tensor}, {self.wire_bytes:.0f} B sent"


class Builder:
    """Appends op nodes to a graph and computes their fake local values. Every new node gets a copy of `meta`; if that
    names a tensor, so does the node."""

    def __init__(self, graph: fx.Graph, mode=None):
        self.graph, self.mode = graph, mode or fake_mode()
        self.meta: dict[str, Any] = {}

    def call(self, target, *args, name: str | None = None, **kwargs) -> fx.Node:
        """Append an op and compute its fake local value."""
        fake_args, fake_kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        value = local_value(target, fake_args, fake_kwargs, self.mode)
        if name is None and "tensor" in self.meta:
            name = f"{self.meta['tensor']}_{target.overloadpacket.__name__}"
        node = self.graph.create_node("call_function", target, args, kwargs, name)
        node.meta = {**self.meta, "val": value}
        return node

    def empty(self, shape: Sequence[int], like: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
        """Return a contiguous fake tensor with the dtype of `like`, on its device or another."""
        with self.mode:
            return torch.empty(shape, dtype=like.dtype, device=device or like.device)


class Emitter:
    """Turns steps into nodes on one device. `reduce_scatter`: "native", or "all_to_all" for an all-to-all and a local
    sum (gloo's own reduce-scatter moves twice the bytes)."""

    def __init__(self, builder: Builder, mesh: Mesh, coordinate: Mapping[str, int], reduce_scatter: str = "native"):
        self.builder, self.mesh, self.coordinate, self.reduce_scatter = builder, mesh, coordinate, reduce_scatter
        self.call = builder.call

    def __call__(self, step: MoveStep, x: fx.Node, shape: Sequence[int], tensor: str) -> fx.Node:
        """Return the local value after `step`, given the one before it. `shape` is the global shape of `tensor`.

        It is contiguous, as every value is that a kernel makes: some backward kernels of ATen read the small tensors
        that their forward left them (a layer norm's mean) without looking at strides."""
        move = step.move
        axes = tuple(a for a in self.mesh.names if a in move.axes and self.mesh.size(a) > 1)
        if not axes:
            return x
        count = math.prod(self.mesh.size(a) for a in axes)
        before = local_shape(shape, step.before, self.mesh, self.coordinate)
        after = local_shape(shape, step.after, self.mesh, self.coordinate)
        lowering = {
            "all_reduce": self._all_reduce,
            "all_gather": self._all_gather,
            "reduce_scatter": self._reduce_scatter,
            "all_to_all": self._all_to_all,
            "slice": self._slice,
        }[move.kind]
        bytes_ = math.prod(shape) * x.meta["val"].element_size()
        group = Group(self, move, axes, count, tensor, bytes_)
        if move.kind == "all_gather" and len(axes) > 1:
            y = self._gather_nested(group, x, step, shape)
        elif move.kind == "reduce_scatter" and len(axes) > 1:
            y = self._scatter_nested(group, x, step, shape)
        else:
            y = lowering(group, x, move, before, after)
        y = contiguous(self.builder, y)
        rename(y, f"{tensor}_{move.kind}")
        return y

    def _all_reduce(self, group, x, move, before, after):
        return group.run(c10d.all_reduce.default, x, move.reduction)

    def _all_gather(self, group, x, move, before, after):
        x = self.pad(x, {move.dim: -(-after[move.dim] // group.count)})
        y = group.run(c10d.all_gather_into_tensor.default, x, group.count)
        return self.cut(self._unstack(y, group.count, move.dim, move.parts), {move.dim: after[move.dim]})

    def _gather_nested(self, group, x, step: MoveStep, shape: Sequence[int]):
        """Undo the cuts of a dim by several axes at once: blocks arrive in the order of the ranks, which is that of the
        mesh's axes, and belong in the order in which the axes cut."""
        d, size, places = cast(int, step.move.dim), self.mesh.size, group.places()
        sizes = [local_shape(shape, step.before, self.mesh, {**self.coordinate, **at})[d] for at in places]
        block, cut = max(sizes), [a for a in step.move.axes if a in group.axes]
        y = group.run(c10d.all_gather_into_tensor.default, self.pad(x, {d: block}), group.count)
        y = self._unstack(y, group.count, d, 1)
        if min(sizes) == block:
            if cut == list(group.axes):
                return y
            rest = list(y.meta["val"].shape)
            y = self.call(aten.reshape.default, y, [*rest[:d], *map(size, group.axes), block, *rest[d + 1 :]])
            inner = [d + group.axes.index(a) for a in cut]
            after = range(d + len(cut), len(rest) + len(cut))
            y = self.call(aten.permute.default, y, [*range(d), *inner, *after])
            return self.call(aten.reshape.default, y, rest)
        order = sorted(range(group.count), key=lambda i: [places[i][a] for a in cut])
        parts = [self.call(aten.slice.Tensor, y, d, i * block, i * block + sizes[i]) for i in order if sizes[i]]
        return self.call(aten.cat.default, parts, d)

    def _reduce_scatter(self, group, x, move, before, after):
        n, d = group.count, move.dim
        x = self._stack(self.pad(x, {d: n * -(-before[d] // n)}), n, d, move.parts)
        return self.cut(self.reduced_blocks(group, x), {d: after[d]})

    def _scatter_nested(self, group, x, step: MoveStep, shape: Sequence[int]):
        """Cut a dim of a sum by several axes at once, in the order of the mesh, which is that of the ranks."""
        d, here = cast(int, step.move.dim), [{**self.coordinate, **at} for at in group.places()]
        sizes = [local_shape(shape, step.after, self.mesh, at)[d] for at in here]
        if min(sizes) == (block := max(sizes)):
            return self.reduced_blocks(group, self._stack(x, group.count, d, 1))
        starts = itertools.accumulate(sizes, initial=0)
        pieces = [self.call(aten.slice.Tensor, x, d, start, start + n) for start, n in zip(starts, sizes)]
        x = self.call(aten.cat.default, [self.pad(piece, {d: block}) for piece in pieces], 0)
        return self.cut(
            self.reduced_blocks(group, x), {d: local_shape(shape, step.after, self.mesh, self.coordinate)[d]}
        )

    def reduced_blocks(self, group: Group, x: fx.Node) -> fx.Node:
        """Return this device's block of dim 0 of the sum over a group, or of what else the group's move makes of it."""
        if self.reduce_scatter == "native":
            return group.run(c10d.reduce_scatter_tensor.default, x, group.move.reduction, group.count)
        y = group.exchange(x)
        rows, *rest = y.meta["val"].shape
        reduce = aten.amax.default if group.move.reduction == "max" else aten.sum.dim_IntList
        return self.call(reduce, self.call(aten.reshape.default, y, [group.count, rows // group.count, *rest]), [0])

    def _all_to_all(self, group, x, move, before, after):
        n, d, e = group.count, move.dim, move.to_dim
        x = self.pad(x, {d: -(-after[d] // n), e: n * -(-before[e] // n)})
        y = self._unstack(group.exchange(self._stack(x, n, e, move.to_parts)), n, d, move.parts)
        return self.cut(y, {d: after[d], e: after[e]})

    def _slice(self, group, x, move, before, after):
        d, index, count = move.dim, self.coordinate[move.axes[0]], group.count
        if move.parts == 1:
            return self.call(aten.slice.Tensor, x, d, *chunk(before[d], count, index))
        if move.parts == ZIGZAG:
            at = dim_ranges(before[d], move.axes, ZIGZAG, self.mesh, self.coordinate)
            return self.call(aten.cat.default, [self.call(aten.slice.Tensor, x, d, *ends) for ends in at], d)
        block = before[d] // (move.parts * count)
        y = self.call(aten.reshape.default, x, [*before[:d], move.parts, count, block, *before[d + 1 :]])
        y = self.call(aten.select.int, y, d + 1, index)
        return self.call(aten.reshape.default, y, [*before[:d], move.parts * block, *before[d + 1 :]])

    def _stack(self, x, count, d, parts):
        """Turn (.., parts * count * b, ..) to (count * .., parts * b, ..): block i of each part to rows i of dim 0."""
        shape, is_zigzag, parts = list(x.meta["val"].shape), parts == ZIGZAG, abs(parts)
        block = shape[d] // (parts * count)
        if d > 0 or parts > 1:
            y = self.call(aten.reshape.default, x, [*shape[:d], parts, count, block, *shape[d + 1 :]])
            y = self._turned(y, d) if is_zigzag else y
            y = self.call(aten.permute.default, y, _moved(len(shape) + 2, d + 1, 0))  # (count, .., parts, b, ..)
            shape[d] = parts * block
            x = self.call(aten.reshape.default, y, [count * shape[0], *shape[1:]])
        return x

    def _unstack(self, y, count, d, parts):
        """Turn (count * .., parts * b, ..) into (.., parts * count * b, ..): the inverse of `_stack`."""
        if d == 0 and parts == 1:
            return y
        shape, is_zigzag, parts = list(y.meta["val"].shape), parts == ZIGZAG, abs(parts)
        shape[0] //= count
        block = shape[d] // parts
        y = self.call(aten.reshape.default, y, [count, *shape[:d], parts, block, *shape[d + 1 :]])
        y = self.call(aten.permute.default, y, _moved(len(shape) + 2, 0, d + 1))  # (.., parts, count, b, ..)
        y = self._turned(y, d) if is_zigzag else y
        shape[d] *= count
        return self.call(aten.reshape.default, y, shape)

    def _turned(self, y, d):
        """Put the blocks of the second part in reverse order: (.., 2, count, b, ..)."""
        first, second = (self.call(aten.slice.Tensor, y, d, i, i + 1) for i in range(2))
        return self.call(aten.cat.default, [first, self.call(aten.flip.default, second, [d + 1])], d)

    def pad(self, x, sizes: Mapping[int, int]):
        """Add zeros after the end of some dims, up to the given sizes."""
        shape = x.meta["val"].shape
        missing = [sizes.get(d, size) - size for d, size in enumerate(shape)]
        if not any(missing):
            return x
        return self.call(aten.constant_pad_nd.default, x, [p for m in reversed(missing) for p in (0, m)], 0)

    def cut(self, x, sizes: Mapping[int, int]):
        """Keep the start of some dims, up to the given sizes."""
        for d, size in sizes.items():
            if x.meta["val"].shape[d] != size:
                x = self.call(aten.slice.Tensor, x, d, 0, size)
        return x


@dataclass(frozen=True)
class Group:
    """The devices that take part in one step; `tensor_bytes` of the global tensor."""

    emitter: Emitter
    move: Move
    axes: tuple[str, ...]
    count: int
    tensor: str
    tensor_bytes: int

    def places(self) -> list[dict[str, int]]:
        """Return the coordinates of the members along the axes, in order of their ranks."""
        size = self.emitter.mesh.size
        return [dict(zip(self.axes, at)) for at in itertools.product(*(range(size(a)) for a in self.axes))]

    def run(self, op, x: fx.Node, *args) -> fx.Node:
        """Start a collective and wait for it."""
        builder, kind, n = self.emitter.builder, self.move.kind, self.count
        x = contiguous(builder, x)
        sent = bytes_of(x.meta["val"]) * {"all_gather": n - 1, "all_reduce": 2 * (n - 1) / n}.get(kind, (n - 1) / n)
        started = builder.call(op, x, *args, ",".join(self.axes), name=f"{self.tensor}_{kind}_start")
        phase = builder.meta.get("phase", "forward")
        started.meta["collective"] = Collective(kind, self.axes, sent, self.tensor, phase)
        started.meta["tensor_bytes"] = self.tensor_bytes
        return builder.call(c10d.wait_tensor.default, started)

    def exchange(self, x: fx.Node) -> fx.Node:
        """Run an all-to-all of equal blocks on dim 0."""
        rows = [x.meta["val"].shape[0] // self.count] * self.count
        return self.run(c10d.all_to_all_single.default, x, rows, rows)


def contiguous(builder: Builder, x: fx.Node, name: str | None = None) -> fx.Node:
    """Return `x`, or a copy of it if its fake value is not contiguous."""
    if x.meta["val"].is_contiguous():
        return x
    return builder.call(aten.clone.default, x, memory_format=torch.contiguous_format, name=name)


def _moved(ndim: int, source: int, to: int) -> list[int]:
    """Return the permutation that moves one dim: result dim `to` is `source`, the others keep their order."""
    order = [d for d in range(ndim) if d != source]
    order.insert(to, source)
    return order
