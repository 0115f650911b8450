"""`autopar::dispatch` and `combine` on one device: rows to the devices that own their experts, and back.

Where a device has a block of the rows, it sends each to its owner, sorted by expert: the devices tell each other how
many of each expert, once for each grouping, and an all-to-all of run-time sizes carries them. So the experts of rows
are known without a message of their own. Where a device has all rows it picks its own, and on the way back puts what it
made of them between zeros. Where no axis has rows by owner nothing happens.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import cast

import torch
from torch import fx

from ..._torch import c10d
from ...cost.exchange import goes_once, token_sizes
from ...ir.graph import bytes_of
from ...ir.layout import Layout, local_offset, local_shape
from ...ir.mesh import Mesh
from ...ops import autopar
from ...ops.expert_rows import told_sizes
from ...plans.sharding import NodeSharding
from .emit import Builder, Collective

aten = torch.ops.aten


def started_by(name: str) -> str:
    """Return the name of the node that starts to send the rows of an op."""
    return f"{name}_exchange_start"


class RowExchange:
    """Adds these ops to one device's graph. Routes are made once for each grouping and layout. `nodes`: how the plan
    cuts each op."""

    def __init__(
        self,
        builder: Builder,
        mesh: Mesh,
        coordinate: Mapping[str, int],
        rank: int,
        nodes: Mapping[str, NodeSharding],
    ):
        self.builder, self.mesh, self.coordinate, self.rank, self.nodes = builder, mesh, coordinate, rank, nodes
        self.routes: dict[tuple, tuple[fx.Node, ...]] = {}
        self.told: dict[tuple, tuple[fx.Node, fx.Node, int]] = {}  # by grouping: what, counts of rows, the first expert

    def __call__(self, node: fx.Node, sharding: NodeSharding, x: fx.Node, group: fx.Node, experts: int) -> fx.Node:
        """Return the local value of a dispatch or combine."""
        is_way_back = node.target is autopar.combine.default
        layout = sharding.inputs[0] if is_way_back else sharding.outputs[0]
        axes = self.owned_axes(layout)
        if not axes:
            return x
        shape = local_shape(node.meta["val"].shape, sharding.outputs[0], self.mesh, self.coordinate)
        if set(axes) & set(sharding.inputs[1].sharding_axes):
            route = self.route(node, group, axes, experts)
            if x is group:
                return self.groups(group, axes, experts, shape[0])
            return self._sent(node, x, route, axes, is_way_back, shape[0])
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
            known = experts, self.firsts(axes, experts), self.blocks(group, axes), self.place(axes), rows
            hot = self.hot_of_all(group, axes, experts)
            self.routes[key] = (self.helper(group, autopar.own_rows.default, group, *known, *hot),)
        return self.routes[key][0]

    def blocks(self, group: fx.Node, axes: tuple[str, ...]) -> list[int]:
        """Return the first row of the block of every device along some axes but the first, of rows that all of them
        have."""
        places = map(self.mesh.coordinate, self.mesh.group(axes, self.rank)[1:])
        return [local_offset((len(group.meta["val"]),), Layout((axes,)), self.mesh, place, 0) for place in places]

    def hot_of_all(self, group: fx.Node, axes: tuple[str, ...], experts: int) -> tuple[fx.Node, ...]:
        """Return the experts whose rows stay where they are, of rows that all devices have; nothing if there are
        none."""
        return ()

    def route(self, node: fx.Node, group: fx.Node, axes: tuple[str, ...], experts: int) -> tuple[fx.Node, ...]:
        """Return the order of rows by owner and expert, its inverse, and the counts of rows that are sent and
        received, for an op that moves rows of a grouping."""
        key = (group, axes, "sent")
        if key not in self.routes:
            firsts = self.firsts(axes, experts)
            order, inverse = self._ordered(group, experts, firsts)
            told = self.helper(group, autopar.told.default, group, experts, firsts, self._sent_once(node))
            received = self.tell(group, told, axes, experts)
            found = self.helper(group, autopar.told_on_host.default, told, received, told_sizes(experts, firsts))
            rows, tokens = (self.helper(group, operator.getitem, found, i) for i in range(2))
            self.routes[key] = order, inverse, rows
            self.routes[group, axes, "tokens"] = (tokens,)
            self.told[group, axes] = received, rows, self._first_told(axes, firsts)
        return self.routes[key]

    def _ordered(self, group: fx.Node, *known) -> tuple[fx.Node, ...]:
        route = self.helper(group, autopar.route.default, group, *known)
        return tuple(self.helper(group, operator.getitem, route, i) for i in range(2))

    def tell(self, group: fx.Node, told: fx.Node, axes: tuple[str, ...], experts: int) -> fx.Node:
        """Return what a device is told by each other one, given what it tells them."""
        sizes, name = told_sizes(experts, self.firsts(axes, experts)), ",".join(axes)
        received = [sizes[self.place(axes)]] * len(sizes)
        started = self.helper(group, c10d.all_to_all_single.default, told, received, sizes, name)
        self.mark(started, bytes_of(told.meta["val"]), axes, f"{group.name}_counts")
        return self.helper(group, c10d.wait_tensor.default, started)

    def place(self, axes: tuple[str, ...]) -> int:
        """Return the place of the device itself among those of a group."""
        return self.mesh.group(axes, self.rank).index(self.rank)

    def _first_told(self, axes: tuple[str, ...], firsts: list[int]) -> int:
        """Return the first expert that a device is told of."""
        return [-1, *firsts][self.place(axes)]

    def _sent_once(self, node: fx.Node) -> int:
        """Return the experts of a token if tokens of the grouping of an op go once to a device, 0 if none does."""
        users = [user for user in cast(fx.Node, node.args[1]).users if user.name in self.nodes]
        return max((token_sizes(n)[1] for n in users if goes_once(n, self.nodes[n.name].choice)), default=0)

    def groups(self, group: fx.Node, axes: tuple[str, ...], experts: int, expected: int) -> fx.Node:
        """Return the experts of the rows that a device gets, `expected` ones where a graph is made."""
        key = (group, axes, "groups")
        if key not in self.routes:
            known = *self.told[group, axes], expected, group.meta["val"].dtype
            self.routes[key] = (self.helper(group, autopar.groups_received.default, *known),)
        return self.routes[key][0]

    def token_counts(self, group: fx.Node, axes: tuple[str, ...], sent: fx.Node, place: fx.Node) -> fx.Node:
        """Return the counts of tokens that are sent and received, given those that are sent, and the places of the
        tokens of rows that are received."""
        return self.routes[group, axes, "tokens"][0]

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
