"""`autopar::dispatch_tokens` and `combine_tokens` on one device: tokens become rows at the devices that own their
experts, and the sums of their rows come back.

A token goes once for each of its experts, or once to each device that has some of them, which makes its rows there and
adds them up before it sends them back. Which rows are of which token is told by a number a row, sent once for each
grouping.
Where a device has all tokens it makes the rows of its own experts, and on the way back adds them up between zeros.
"""

from __future__ import annotations

import math
import operator

import torch
from torch import fx

from ..._torch import c10d
from ...cost.exchange import BACK, devices_of_token, goes_once, token_sizes
from ...ir.graph import bytes_of
from ...ir.layout import local_shape
from ...ops import autopar
from ...plans.sharding import NodeSharding
from .exchange_rows import RowExchange

aten = torch.ops.aten


class TokenExchange:
    """Adds these ops to one device's graph, with the routes of the rows."""

    def __init__(self, rows: RowExchange):
        self.rows, self.builder, self.mesh = rows, rows.builder, rows.mesh
        self.routes: dict[tuple, tuple[fx.Node, ...]] = {}

    def __call__(
        self, node: fx.Node, sharding: NodeSharding, x: fx.Node, group: fx.Node, experts: int, *rest
    ) -> fx.Node:
        """Return the local value of a dispatch or combine of tokens."""
        is_way_back = node.target in BACK
        layout = sharding.inputs[0] if is_way_back else sharding.outputs[0]
        axes, active = self.rows.owned_axes(layout), token_sizes(node)[1]
        shape = local_shape(node.meta["val"].shape, sharding.outputs[0], self.mesh, self.rows.coordinate)
        if not axes:
            return self._summed(node, x, active) if is_way_back else self._copied(node, x, active)
        if not set(axes) & set(sharding.inputs[1].sharding_axes):
            token = self._token_of(self.rows.picked(group, layout, experts), active)
            if is_way_back:
                return self._added(node, x, token, shape)
            return self.builder.call(aten.index_select.default, x, 0, token, name=node.name)
        if goes_once(node, sharding.choice):
            send = self._back_once if is_way_back else self._once
        else:
            send = self._back_each if is_way_back else self._each
        return send(node, x, group, axes, experts, active, shape, *rest[1:])

    def _copied(self, node: fx.Node, x: fx.Node, active: int) -> fx.Node:
        value = x.meta["val"]
        wide = self.builder.call(aten.unsqueeze.default, x, 1, name=f"{node.name}_wide")
        wide = self.builder.call(aten.expand.default, wide, [len(value), active, *value.shape[1:]])
        return self.builder.call(aten.reshape.default, wide, [len(value) * active, *value.shape[1:]], name=node.name)

    def _summed(self, node: fx.Node, y: fx.Node, active: int) -> fx.Node:
        value = y.meta["val"]
        shape = [len(value) // active, active, *value.shape[1:]]
        split = self.builder.call(aten.reshape.default, y, shape, name=f"{node.name}_split")
        if active == 2:  # on CPUs a sum over so few takes several times as long
            first, second = (self.builder.call(aten.select.int, split, 1, i) for i in range(2))
            return self.builder.call(aten.add.Tensor, first, second, name=node.name)
        return self.builder.call(aten.sum.dim_IntList, split, [1], name=node.name)

    def _added(self, node: fx.Node, y: fx.Node, token: fx.Node, shape: tuple[int, ...]) -> fx.Node:
        zeros = self.builder.call(aten.new_zeros.default, y, list(shape), name=f"{node.name}_zeros")
        return self.builder.call(aten.index_add.default, zeros, 0, token, y, name=node.name)

    def _each(self, node: fx.Node, x: fx.Node, group: fx.Node, axes, experts: int, active: int, shape) -> fx.Node:
        """Send a token for each of its experts."""
        order, _, counts = self.rows.route(node, group, axes, experts)
        sent = self.builder.call(
            aten.index_select.default, x, 0, self._token_of(order, active), name=f"{node.name}_sorted"
        )
        return self.rows.exchange(node, sent, counts, axes, False, shape[0], bytes_of(sent.meta["val"]))

    def _back_each(self, node, y: fx.Node, group: fx.Node, axes, experts: int, active: int, shape, dtype) -> fx.Node:
        """Send every row back and add up those of a token."""
        _, inverse, counts = self.rows.route(node, group, axes, experts)
        wide, y = y.meta["val"].dtype, self._cast(y, dtype)
        moved = bytes_of(y.meta["val"])
        y = self.rows.exchange(node, y, counts, axes, True, len(group.meta["val"]), moved)
        y = self._cast(self.rows.in_order(y, inverse, len(group.meta["val"])), wide)
        return self._summed(node, y, active)

    def _once(self, node: fx.Node, x: fx.Node, group: fx.Node, axes, experts: int, active: int, shape) -> fx.Node:
        """Send a token to each device that has some of its experts, which makes its rows."""
        token, place, counts = self._route(node, group, axes, experts, active)
        sent = self.builder.call(aten.index_select.default, x, 0, token, name=f"{node.name}_sorted")
        moved = bytes_of(x.meta["val"]) * devices_of_token(experts, active, self._ways(axes))
        received = self.rows.exchange(node, sent, counts, axes, False, len(sent.meta["val"]), moved)
        return self.builder.call(aten.index_select.default, received, 0, place, name=node.name)

    def _back_once(self, node, y: fx.Node, group: fx.Node, axes, experts: int, active: int, shape, dtype) -> fx.Node:
        """Add up the rows of a token, send the sums back and add them up."""
        token, place, counts = self._route(node, group, axes, experts, active)
        wide, expected = y.meta["val"].dtype, len(token.meta["val"])
        y = self.builder.call(autopar.sum_rows.default, y, place, counts, expected, name=f"{node.name}_sums")
        y = self._cast(y, dtype)
        token_bytes = math.prod(shape) * dtype.itemsize
        moved = token_bytes * devices_of_token(experts, active, self._ways(axes))
        y = self._cast(self.rows.exchange(node, y, counts, axes, True, expected, moved), wide)
        return self._added(node, y, token, shape)

    def _route(
        self, node: fx.Node, group: fx.Node, axes: tuple[str, ...], experts: int, active: int
    ) -> tuple[fx.Node, ...]:
        """Return which tokens are sent, sorted by device, the token of each row among those that are received, and the
        counts of tokens that are sent and received."""
        key = (group, axes, active)
        if key not in self.routes:
            helper, firsts = self.rows.helper, self.rows.firsts(axes, experts)
            order, _, counts = self.rows.route(node, group, axes, experts)
            expected = math.ceil(devices_of_token(experts, active, self._ways(axes)))
            known = firsts, active, expected, *self.rows.staying(group, axes, experts)
            route = helper(group, autopar.route_tokens.default, group, order, *known)
            token, place, sent = (helper(group, operator.getitem, route, i) for i in range(3))
            rows = len(group.meta["val"])
            moved = bytes_of(place.meta["val"])
            place = helper(group, autopar.exchange_rows.default, place, counts, False, rows, ",".join(axes))
            self.rows.mark(place, moved, axes, f"{group.name}_places")
            place = helper(group, c10d.wait_tensor.default, place)
            tokens = self.rows.token_counts(group, axes, sent, place)
            place = helper(group, autopar.places_of_tokens.default, place, counts, tokens)
            self.routes[key] = token, place, tokens
        return self.routes[key]

    def _token_of(self, rows: fx.Node, active: int) -> fx.Node:
        """Return the tokens of which rows are."""
        key = (rows, active)
        if key not in self.routes:
            self.routes[key] = (self.rows.helper(rows, aten.floor_divide.default, rows, active),)
        return self.routes[key][0]

    def _cast(self, y: fx.Node, dtype: torch.dtype) -> fx.Node:
        return y if y.meta["val"].dtype == dtype else self.builder.call(aten._to_copy.default, y, dtype=dtype)

    def _ways(self, axes: tuple[str, ...]) -> int:
        return math.prod(map(self.mesh.size, axes))
