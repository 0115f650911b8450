"""Attention of queries that are cut in zigzag, on one device: one call for each of its two ranges of queries.

Keys and values are whole. Of a causal attention each range attends to the keys up to its own places; outputs follow one
another, gradients of keys and values add up. Without a causal mask one call serves all queries, wherever they are, if
there is no window and no weights are dropped, as those of each range have places of their own.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from ..._torch import op_name
from ...ir.layout import ZIGZAG, dim_ranges
from ...ir.mesh import Mesh
from ...ops import ATTENTION, autopar
from ...plans.sharding import NodeSharding
from ...rules.localize import heads_read, weights_from
from ...rules.reading import bound, tensors_by_name
from .emit import Builder

aten = torch.ops.aten
ROWS = 2  # the dim of queries


class ZigzagAttention:
    """Adds the calls of an attention to one device's graph."""

    def __init__(self, builder: Builder, mesh: Mesh, coordinate: Mapping[str, int]):
        self.builder, self.mesh, self.coordinate = builder, mesh, coordinate

    def is_several(self, node: fx.Node, sharding: NodeSharding) -> bool:
        """Return whether an op is attention of which the device has two ranges of queries that it tells apart."""
        if node.target not in ATTENTION or self._layout(node, sharding).parts[ROWS] != ZIGZAG:
            return False
        given = bound(node)
        return given["causal"] or given["window"] > 0 or given["state"] is not None

    def __call__(self, node: fx.Node, sharding: NodeSharding, args: Sequence) -> list[fx.Node]:
        """Return the local outputs of an attention, forward or backward. `args`: its arguments, tensors local."""
        self.builder.meta = {**self.builder.meta, "part_of": node.name}
        given, layout = bound(node), self._layout(node, sharding)
        ranges = dim_ranges(given["q"].meta["val"].shape[ROWS], layout.dims[ROWS], ZIGZAG, self.mesh, self.coordinate)
        position = list(tensors_by_name(node)).index("q")
        at = node, sharding.inputs, self.mesh, self.coordinate, position
        heads = heads_read(*at)
        local = dict(zip(given, args))
        rows = ("grad", "q", "out", "lse")
        made: list[list[fx.Node]] = []
        start = 0
        for first, stop in ranges:
            end = start + stop - first
            own = {name: self._rows(node, x, start, end) if name in rows else x for name, x in local.items()}
            if local["mask"] is not None and local["mask"].meta["val"].shape[-2] > 1:
                own["mask"] = self._rows(node, local["mask"], start, end, -2)
            if local.get("documents") is not None:
                own["documents"] = self._rows(node, local["documents"], start, end, -1)
            own |= {"first": given["first"] + first} | heads | weights_from(*at, first)
            op = self.builder.call(node.target, *own.values(), name=f"{node.name}_{len(made)}")
            made.append([self.builder.call(operator.getitem, op, i) for i in range(len(op.meta["val"]))])
            start = end
        one, other = made
        if node.target is autopar.attention.default:
            return [self._joined(node, one[0], other[0]), self._call(node, aten.cat.default, [one[1], other[1]], ROWS)]
        sums = [self._call(node, aten.add.Tensor, a, b) for a, b in zip(one[1:], other[1:])]
        if len(sums) == 3 and local["mask"].meta["val"].shape[-2] > 1:
            sums[2] = self._call(node, aten.cat.default, [one[3], other[3]], -2)
        return [self._joined(node, one[0], other[0]), *sums]

    def _layout(self, node: fx.Node, sharding: NodeSharding):
        return sharding.inputs[list(tensors_by_name(node)).index("q")]

    def _call(self, node: fx.Node, target, *args) -> fx.Node:
        return self.builder.call(target, *args, name=f"{node.name}_{op_name(target)}")

    def _rows(self, node: fx.Node, x: fx.Node, start: int, end: int, dim: int = ROWS) -> fx.Node:
        return self._call(node, aten.slice.Tensor, x, dim, start, end)

    def _joined(self, node: fx.Node, one: fx.Node, other: fx.Node) -> fx.Node:
        """Return values of one range of queries behind those of the other, (b, h, s, d) stored as (b, s, h, d)."""
        turned = [self._call(node, aten.transpose.int, x, 1, ROWS) for x in (one, other)]
        return self._call(node, aten.transpose.int, self._call(node, aten.cat.default, turned, 1), 1, ROWS)
