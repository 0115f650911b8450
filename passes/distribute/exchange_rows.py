"""`autopar::dispatch` and `combine` on one device: rows to the devices that own their experts, and back.

Where a device has a block of the rows, it sends each to its owner: the devices tell each other how many, once for each
grouping, and an all-to-all of run-time sizes carries them. Where it has all rows it picks its own, and on the way back
puts what it made of them between zeros. Where no axis has rows by owner nothing happens.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping

import torch
from torch import fx

from ..._torch import c10d
from ...ir.graph import bytes_of
from ...ir.layout import Layout, local_offset, local_shape
from ...ir.mesh import Mesh
from ...ops import autopar
from ...plans.sharding import NodeSharding
from .emit import Builder, Collective

aten = torch.ops.aten


def started_by(name: str) -> str:
    """Return the name of the node that starts to send the rows of an op."""
    return f"{name}_exchange_start"


class RowExchange:
    """Adds these ops to one device's graph. Routes are made once for each grouping and layout."""

    def __init__(self, builder: Builder, mesh: Mesh, coordinate: Mapping[str, int], rank: int):
        self.builder, self.mesh, self.coordinate, self.rank = builder, mesh, coordinate, rank
        self.routes: dict[tuple, tuple[fx.Node, ...]] = {}

    def __call__(self, node: fx.Node, sharding: NodeSharding, x: fx.Node, group: fx.Node, experts: int) -> fx.Node:
        """Return the local value of a dispatch or combine."""
        is_way_back = node.target is autopar.combine.default
        layout = sharding.inputs[0] if is_way_back else sharding.outputs[0]
        axes = self.owned_axes(layout)
        if not axes:
            return x
        shape = local_shape(node.meta["val"].shape, sharding.outputs[0], self.mesh, self.coordinate)
        if set(axes) & set(sharding.inputs[1].sharding_axes):
            return self._sent(node, x, self.route(group, axes, experts), axes, is_way_back, shape[0])
        picked = self.picked(group, layout, experts)
        if not is_way_back:
            return self.builder.call(aten.index_select.default, x, 0, picked, name=node.name)
        zeros = self.builder.call(aten.new_zeros.default, x, list(shape), name=f"{node.name}_zeros")
        return self.builder.call(aten.index_copy.default, zeros, 0, picked, x, name=node.name)

    def check(self, node: fx.Node, choice: tuple[str, ...]) -> None:
        """Raise VerifyError for an exchange that cannot be made so; any can."""

    def staying(self, group: fx.Node, axes: tuple[str, ...], experts: int) -> tuple:
        """Return the experts whose rows stay where they are, and where that is; nothing if there are none."""
        return ()

    def owned_axes(self, layout: Layout) -> tuple[str, ...]:
        """Return the axes of several devices over which rows are where their experts are."""
        return tuple(a for a in self.mesh.names if a in layout.owned_axes and self.mesh.size(a) > 1)

    def firsts(self, axes: tuple[str, ...], experts: int) -> list[int]:
        """Return the first expert of every device along some axes but the first."""
        places = [self.mesh.coordinate(rank) for rank in self.mesh.group(axes, self.rank)]
        return [local_offset((experts,), Layout((axes,)), self.mesh, place, 0) for place in places[1:]]

    def picked(self, group: fx.Node, layout: Layout, experts: int) -> fx.Node:
        """Return which of all rows a device picks whose rows have a layout."""
        axes = self.owned_axes(layout)
        rows = local_shape(group.meta["global"].shape, Layout((layout.dims[0],)), self.mesh, self.coordinate)[0]
        key = (group, axes, "picked")
        if key not in self.routes:
            place = self.mesh.group(axes, self.rank).index(self.rank)
            firsts = self.firsts(axes, experts)
            self.routes[key] = (self.helper(group, autopar.own_rows.default, group, firsts, place, rows),)
        return self.routes[key][0]

    def route(self, group: fx.Node, axes: tuple[str, ...], experts: int) -> tuple[fx.Node, ...]:
        """Return the order of rows by owner, its inverse, and the counts of rows that are sent and received."""
        key = (group, axes, "sent")
        if key not in self.routes:
            firsts, ways, name = self.firsts(axes, experts), [1] * math.prod(map(self.mesh.size, axes)), ",".join(axes)
            route = self.helper(group, autopar.route.default, group, firsts)
            order, inverse, sent = (self.helper(group, operator.getitem, route, i) for i in range(3))
            started = self.helper(group, c10d.all_to_all_single.default, sent, ways, ways, name)
            self.mark(started, bytes_of(sent.meta["val"]), axes, f"{group.name}_counts")
            received = self.helper(group, c10d.wait_tensor.default, started)
            counts = self.helper(group, autopar.counts_on_host.default, sent, received)
            self.routes[key] = order, inverse, counts
        return self.routes[key]

    def _sent(self, node, x, route, axes: tuple[str, ...], is_way_back: bool, rows: int) -> fx.Node:
        """Send rows and receive others."""
        order, inverse, counts = route
        if not is_way_back:
            x = self.builder.call(aten.index_select.default, x, 0, order, name=f"{node.name}_sorted")
        y = self.exchange(node, x, counts, axes, is_way_back, rows, bytes_of(x.meta["val"]))
        if is_way_back:
            y = self.in_order(y, inverse, rows, node.name)
        return y

    def in_order(self, y: fx.Node, inverse: fx.Node, rows: int, name: str | None = None) -> fx.Node:
        """Return rows that came back in the order of the `rows` of a device."""
        return self.builder.call(aten.index_select.default, y, 0, inverse, name=name)

    def exchange(
        self,
        node: fx.Node,
        x: fx.Node,
        counts: fx.Node,
        axes: tuple[str, ...],
        is_way_back: bool,
        expected: int,
        moved_bytes: float,
    ) -> fx.Node:
        """Send rows and receive `expected` others. `moved_bytes`: of the rows of a device, those for itself among
        them."""
        arguments = (x, counts, is_way_back, expected, ",".join(axes))
        started = self.builder.call(autopar.exchange_rows.default, *arguments, name=started_by(node.name))
        self.mark(started, moved_bytes, axes, node.name)
        return self.builder.call(c10d.wait_tensor.default, started, name=f"{node.name}_exchange")

    def mark(self, started: fx.Node, moved_bytes: float, axes: tuple[str, ...], tensor: str) -> None:
        """Say what a collective sends if experts get equal numbers of rows."""
        ways, phase = math.prod(map(self.mesh.size, axes)), started.meta.get("phase", "forward")
        started.meta["collective"] = Collective("all_to_all", axes, moved_bytes * (ways - 1) / ways, tensor, phase)
        started.meta["tensor_bytes"] = moved_bytes * ways

    def helper(self, group: fx.Node, target, *args) -> fx.Node:
        """Add an op beside the value that is moved, with neither its layout nor its global shape."""
        before = self.builder.meta
        self.builder.meta = {key: before[key] for key in ("phase", "module", "source") if key in before}
        made = self.builder.call(target, *args, name=f"{group.name}_{getattr(target, '_opname', 'item')}")
        self.builder.meta = before
        return made
