"""Rows that go to their experts up to a capacity: what autopar/passes/distribute/exchange_rows.py emits, with at most
so many rows of each pair of devices. Those beyond go in further rounds (passes/distribute/add_rounds.py).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

from torch import fx

from ...cost.exchange import goes_once
from ...errors import VerifyError
from ...ir.graph import describe
from ...ir.layout import Layout, largest_local_numel, local_shape
from ...ir.mesh import Mesh
from ...ops import autopar
from ...ops.expert_rows import told_sizes
from .emit import Builder
from .exchange_rows import RowExchange


class CappedExchange(RowExchange):
    """Adds exchanges of the first round. `capacity`: times the rows that a device has under balanced routing."""

    def __init__(self, builder: Builder, mesh: Mesh, coordinate: Mapping[str, int], rank: int, nodes, capacity: float):
        super().__init__(builder, mesh, coordinate, rank, nodes)
        self.capacity = capacity

    def picked(self, group: fx.Node, layout: Layout, experts: int) -> fx.Node:
        """Return which of all rows a device picks in the first round."""
        axes, key = self.owned_axes(layout), (group, self.owned_axes(layout), "picked")
        if key not in self.routes:
            shape, balanced = tuple(group.meta["global"].shape), Layout((layout.dims[0],))
            expected = local_shape(shape, balanced, self.mesh, self.coordinate)[0]
            rows = largest_local_numel(shape, balanced, self.mesh)
            known = experts, self.firsts(axes, experts), self.blocks(group, axes), self.place(axes)
            sizes = rows, self.capacity, expected
            found = self.helper(group, autopar.own_rows_by_block.default, group, *known, *sizes)
            order, table = (self.helper(group, operator.getitem, found, i) for i in range(2))
            self.routes[key] = (self.helper(group, autopar.round_rows.default, order, table, 0, expected),)
        return self.routes[key][0]

    def route(self, node: fx.Node, group: fx.Node, axes: tuple[str, ...], experts: int) -> tuple[fx.Node, ...]:
        """Return the rows of the first round by owner, the same again, and the counts of those that are sent and
        received."""
        key = (group, axes, "sent")
        if key not in self.routes:
            firsts = self.firsts(axes, experts)
            order, _ = self._ordered(group, experts, firsts)
            told = self.helper(group, autopar.told_in_rounds.default, group, experts, firsts)
            received = self.tell(group, told, axes, experts)
            rows = largest_local_numel(tuple(group.meta["global"].shape), group.meta["layout"], self.mesh)
            known = told_sizes(experts, firsts), rows, self.capacity
            table = self.helper(group, autopar.counts_in_rounds.default, told, received, *known)
            first = self.helper(group, autopar.round_rows.default, order, table, 0, len(group.meta["val"]))
            self.routes[key] = first, first, self.helper(group, autopar.round_counts.default, table, 0)
            self.told[group, axes] = received, table, self._first_told(axes, firsts)
        return self.routes[key]

    def groups(self, group: fx.Node, axes: tuple[str, ...], experts: int, expected: int) -> fx.Node:
        """Return the experts of the rows that a device gets in the first round."""
        key = (group, axes, "first groups")
        if key not in self.routes:
            every = super().groups(group, axes, experts, expected)
            table = self.told[group, axes][1]
            self.routes[key] = (self.helper(group, autopar.round_groups.default, every, table, 0, expected),)
        return self.routes[key][0]

    def check(self, node: fx.Node, choice: tuple[str, ...]) -> None:
        """Raise VerifyError if tokens are to be sent once for several of their experts: rows are counted, not them."""
        if goes_once(node, choice):
            raise VerifyError(
                f"{node.name} sends tokens once to a device with several of their experts, which has no capacity",
                node=describe(node),
                source=node.meta.get("source"),
                mesh=self.mesh,
                fix="plan with expert_capacity, or leave it out",
            )

    def in_order(self, y: fx.Node, inverse: fx.Node, rows: int, name: str | None = None) -> fx.Node:
        """Return the rows of the first round that came back at their places among all, between zeros."""
        return self.builder.call(autopar.place_rows.default, y, inverse, rows, name=name)
