"""Rows of experts are sorted once for all products of a grouping.

A grouped product sorts the rows that it gets and puts its results back in their order. Where several products have the
same groups, with ops between them that treat rows alike, rows are sorted where they come into that region, forward and
backward, and put back where they leave it:

    order, inverse, ends = by_group(group)
    up = grouped_mm(x[order], ..., ends=ends);  y = grouped_mm(act(up), ..., ends=ends)[inverse]

Where rows are picked on the way in, or written to their places on the way out, that is done in the order instead. The
ops that lead from a product to such places, and the weights that they multiply rows by, follow the order too.
"""

from __future__ import annotations

import math
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
FORM_ALONE = {aten.new_zeros.default}  # what reads a value for its type and device


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
        put = {node for node in found if is_tensor(node) and any(_puts(user, node) for user in node.users)}
        if put:
            wanted |= put | {node for node in found if is_tensor(node) and _width(node) == 1}
        for node in reversed(found):  # those that lead from one product to another, or to places
            if node in wanted:
                self.inside[node] = found[node]
                wanted |= {tensor_of(a)[0] for a in tensor_arguments(node)}
        self._add_weighted()

    def _add_weighted(self) -> None:
        """Find the ops before products on rows that come in for another op as well, with a number for each."""
        for node in reversed(self.group.graph.nodes):
            if node in self.inside or not is_op(node) or not is_tensor(node) or not self._is_read_inside_alone(node):
                continue
            coming = {a for n in self.inside for a in self._rows(n) if tensor_of(a)[0] not in self.inside} - {node}
            flags = rows_of(node, coming)
            rows = [a for a, flag in zip(tensor_arguments(node), flags) if flag]
            if rows and all(a in coming or _width(a) == 1 for a in rows):
                self.inside[node] = flags

    def _rows(self, node: fx.Node) -> list[fx.Node]:
        """Return the arguments of an op of the region that are rows."""
        return [a for a, flag in zip(tensor_arguments(node), self.inside[node]) if flag and a is not self.group]

    def _is_read_inside_alone(self, node: fx.Node) -> bool:
        return bool(node.users) and all(user in self.inside and node in self._rows(user) for user in node.users)

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
            swap = {a: self._entering(a, node) for a in self._rows(node)}
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
                picked = _picked(value)
                if picked is None:
                    made = self.builder.call(aten.index_select.default, value, 0, self.order)
                else:
                    of, place = picked
                    in_order = self.builder.call(aten.index_select.default, place, 0, self.order)
                    made = self.builder.call(aten.index_select.default, of, 0, in_order)
            made.meta = {**{k: v for k, v in value.meta.items() if k != "sharding"}, **made.meta}
            self.sorted[value] = made
        return self.sorted[value]

    def _leaving(self, value: fx.Node) -> None:
        """Let what reads a value outside of the region read it in the order in which rows came."""
        outside = [user for user in value.users if user not in self.inside and user.target is not operator.getitem]
        others = [user for user in outside if user.target not in FORM_ALONE]
        for user in [user for user in others if _puts(user, value)]:
            place, _ = PUTS[user.target]
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


def _picked(value: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return what rows are picked from, and their numbers there; None for rows that are not."""
    if value.target is aten.index_select.default and value.args[1] == 0:
        return operand(value), operand(value, 2)
    if value.target is aten.index.Tensor and len(places := cast(list[fx.Node], value.args[1])) == 1:
        place = places[0].meta["val"]
        return (operand(value), places[0]) if place.dim() == 1 and place.dtype in (torch.int32, torch.int64) else None
    return None


def _puts(user: fx.Node, value: fx.Node) -> bool:
    """Return whether an op puts the rows of a value at places, and reads it for nothing else."""
    if user.target not in PUTS:
        return False
    _, rows = PUTS[user.target]
    return user.args[rows] is value and [a for a in user.all_input_nodes if a is value] == [value]


def _width(node: fx.Node) -> int:
    """Return the elements of a row."""
    return math.prod(node.meta["val"].shape[1:])
