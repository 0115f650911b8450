"""Rows of experts are sorted once for all products of a grouping.

A grouped product sorts the rows that it gets and puts its results back in their order. Where several products have the
same groups, with ops between them that treat rows alike, rows are sorted where they come into that region, forward and
backward, and put back where they leave it:

    order, inverse, ends = by_group(group)
    up = grouped_mm(x[order], ..., ends=ends);  y = grouped_mm(act(up), ..., ends=ends)[inverse]

Where rows are picked on the way in, or written to their places on the way out, that is done in the order instead.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import cast

import torch
from torch import fx

from ...ir.graph import is_op, is_tensor, operand, tensor_arguments, tensor_of
from ...ops import autopar
from ...rules.expert_rows import PRODUCTS
from ..canonicalize.dispatch import rows_of, rows_of_product
from .emit import Builder
from .replace import origin

aten = torch.ops.aten
# ops that put rows at places, each with the positions of the places and of the rows
PUTS: dict[object, tuple[int, int]] = {
    aten.index_copy.default: (2, 3),
    aten.index_add.default: (2, 3),
    autopar.sum_rows.default: (1, 0),
    autopar.place_rows.default: (1, 0),
}


def sort_rows(local: fx.GraphModule) -> fx.GraphModule:
    """Rewrite a local joint graph in place and return its module."""
    groupings: dict[tuple, list[fx.Node]] = defaultdict(list)
    for node in local.graph.nodes:
        if node.target in PRODUCTS:
            groupings[_grouping(node)].append(node)
    regions = [_Region(products, *key) for key, products in groupings.items() if len(products) > 1]
    for region in regions:
        region.sort()
    if regions:
        local.graph.eliminate_dead_code()
        local.graph.lint()
        local.recompile()
    return local


def _grouping(node: fx.Node) -> tuple[fx.Node, int, int]:
    """Return the groups of a product's rows, how many of them have a matrix, and the first of these."""
    is_dw = node.target is autopar.grouped_mm_dw.default
    count = node.args[3] if is_dw else operand(node, 1).meta["val"].shape[0]
    at = 4 if is_dw else 3
    offset = node.args[at] if len(node.args) > at else node.kwargs.get("offset", 0)
    return operand(node, 2), cast(int, count), cast(int, offset)


class _Region:
    """The products of one grouping on a device, with the ops on rows between them."""

    def __init__(self, products: list[fx.Node], group: fx.Node, count: int, offset: int):
        self.products, self.group, self.count, self.offset = products, group, count, offset
        self.inside = {node: rows_of_product(node) for node in products}  # which arguments are rows
        self.sorted: dict[fx.Node, fx.Node] = {}
        made, found = {p for p in products if p.target is autopar.grouped_mm.default}, {}
        for node in group.graph.nodes:
            if is_op(node) and node not in self.inside and {tensor_of(a)[0] for a in tensor_arguments(node)} & made:
                flags = rows_of(node, made)
                if any(flags):
                    found[node] = flags
                    made.add(node)
        wanted = {tensor_of(a)[0] for p in products for a in tensor_arguments(p)}
        for node in reversed(found):  # those that lead from one product to another
            if node in wanted:
                self.inside[node] = found[node]
                wanted |= {tensor_of(a)[0] for a in tensor_arguments(node)}

    def sort(self) -> None:
        """Let all products take and give rows in the order of their groups."""
        graph = self.group.graph
        self.builder = Builder(graph, self.group.meta["val"].fake_mode)
        with graph.inserting_after(self.group):
            self.builder.meta = origin(self.group)
            name = f"{self.group.name}_by_group"
            found = self.builder.call(autopar.by_group.default, self.group, self.count, self.offset, name=name)
        with graph.inserting_after(found):
            self.order, self.inverse, self.ends = (
                self.builder.call(operator.getitem, found, i, name=f"{name}_{i}") for i in (0, 1, 2)
            )
        at = {node: i for i, node in enumerate(graph.nodes)}
        nodes = sorted(self.inside, key=at.__getitem__)
        for node in nodes:
            flags = iter(self.inside[node])
            swap = {a: self._entering(a, node) for a in tensor_arguments(node) if next(flags) and a is not self.group}
            for value, rows in swap.items():
                node.replace_input_with(value, rows)
            if node in self.products:
                node.kwargs = {**node.kwargs, "ends": self.ends}
        for node in nodes:
            values = [node] if is_tensor(node) else [user for user in node.users if is_tensor(user)]
            for value in values if node.target is not autopar.grouped_mm_dw.default else ():
                self._leaving(value)

    def _entering(self, value: fx.Node, reader: fx.Node) -> fx.Node:
        """Return a value with its rows in the order of their groups, before the first op that reads it."""
        if tensor_of(value)[0] in self.inside:
            return value
        if value not in self.sorted:
            self.builder.meta = origin(value)
            with value.graph.inserting_before(reader):
                if value.target is aten.index_select.default and value.args[1] == 0:
                    place = self.builder.call(aten.index_select.default, value.args[2], 0, self.order)
                    made = self.builder.call(aten.index_select.default, value.args[0], 0, place)
                else:
                    made = self.builder.call(aten.index_select.default, value, 0, self.order)
            made.meta = {**{k: v for k, v in value.meta.items() if k != "sharding"}, **made.meta}
            self.sorted[value] = made
        return self.sorted[value]

    def _leaving(self, value: fx.Node) -> None:
        """Let what reads a value outside of the region read it in the order in which rows came."""
        others = [user for user in value.users if user not in self.inside and user.target is not operator.getitem]
        for user in [user for user in others if user.target in PUTS]:
            place, rows = PUTS[user.target]
            if user.args[rows] is value and [a for a in user.all_input_nodes if a is value] == [value]:
                self.builder.meta = origin(user)
                with value.graph.inserting_before(user):
                    moved = self.builder.call(aten.index_select.default, user.args[place], 0, self.order)
                user.update_arg(place, moved)
                others.remove(user)
        if others:
            self.builder.meta = origin(value)
            with value.graph.inserting_after(value):
                back = self.builder.call(aten.index_select.default, value, 0, self.inverse)
            back.meta = {**{k: v for k, v in value.meta.items() if k != "sharding"}, **back.meta}
            for user in others:
                user.replace_input_with(value, back)
