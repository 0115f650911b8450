"""Mark where rows may go to their experts and come back: `autopar::dispatch` and `combine` around each mixture of
experts.

Between them lie the products of one grouping, forward and backward, and all ops between those that treat rows alike
(gates, activations). Both change nothing: what they allow is another layout (autopar/rules/experts.py).
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import fx

from ...ir.graph import call, is_op, is_tensor, mark_phases, operand, renumbered, tensor_arguments, tensor_of
from ...ops import autopar
from ...rules import rule_of
from ...rules.expert_rows import PRODUCTS, row_factor

aten = torch.ops.aten
VIEWS = {aten.reshape.default, aten.unsqueeze.default, aten.expand.default, aten.squeeze.dim}


def dispatch(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Add dispatch and combine to a joint graph in place and return its module."""
    graph = graph_module.graph
    groupings: dict[tuple, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.target in PRODUCTS:
            groupings[_origin(operand(node, 2)), _experts(node)].append(node)
    for (_, experts), products in groupings.items():
        _Region(graph, products, experts).enclose()
    if groupings:
        graph.eliminate_dead_code()
        mark_phases(graph)
        graph.lint()
        graph_module.graph = renumbered(graph)
    return graph_module


class _Region:
    """The products of one grouping, with the ops on rows between them."""

    def __init__(self, graph: fx.Graph, products: list[fx.Node], experts: int):
        self.graph, self.experts, self.products = graph, experts, set(products)
        self.group = operand(products[0], 2)
        self.inside: dict[fx.Node, list[bool]] = {node: _rows_of_product(node) for node in products}  # which are rows
        self.dispatched: dict[fx.Node, fx.Node] = {}
        self._add_between()

    def _add_between(self) -> None:
        """Find the ops that lead from one product's rows to another's."""
        made, found = {p for p in self.products if p.target is autopar.grouped_mm.default}, {}
        for node in self.graph.nodes:
            if not is_op(node) or node in self.products or not {tensor_of(a)[0] for a in tensor_arguments(node)} & made:
                continue
            is_rows = _rows_of(node, made)
            if any(is_rows):
                found[node] = is_rows
                made.add(node)
        wanted = {tensor_of(a)[0] for p in self.products for a in tensor_arguments(p)}
        for node in reversed(found):
            if node in wanted:
                self.inside[node] = found[node]
                wanted |= {tensor_of(a)[0] for a in tensor_arguments(node)}

    def enclose(self) -> None:
        """Send what the region reads to its experts, and what others read of it back."""
        for node in [n for n in self.graph.nodes if n in self.inside]:
            flags = iter(self.inside[node])
            with self.graph.inserting_before(node):
                swap = {a: self._rows(a) for a in tensor_arguments(node) if next(flags)}
            for value, rows in swap.items():
                node.replace_input_with(value, rows)
        for node in list(self.inside):
            if node.target is autopar.grouped_mm_dw.default:
                continue
            values = [node] if is_tensor(node) else [user for user in node.users if is_tensor(user)]
            for value in values:
                self._bring_back(value)

    def _rows(self, value: fx.Node) -> fx.Node:
        """Return a value with its rows at their experts."""
        if tensor_of(value)[0] in self.inside:
            return value
        key = self.group if _origin(value) == _origin(self.group) else value
        if key not in self.dispatched:
            if value.target is aten.index.Tensor and value.all_input_nodes[1:] == [self.group]:
                made = call(value, aten.index.Tensor, value.args[0], [self._rows(self.group)])
            else:
                made = call(value, autopar.dispatch.default, value, self.group, self.experts)
            made.meta["val"] = value.meta["val"]
            self.dispatched[key] = made
        return self.dispatched[key]

    def _bring_back(self, value: fx.Node) -> None:
        others = [user for user in value.users if user not in self.inside]
        if others:
            with self.graph.inserting_after(value):
                back = call(value, autopar.combine.default, value, self.group, self.experts)
            back.meta["val"] = value.meta["val"]
            for user in others:
                user.replace_input_with(value, back)


def _rows_of(node: fx.Node, made: set[fx.Node]) -> list[bool]:
    """Return which arguments of an op are rows, given the ops that make some; none if it does not treat rows alike."""
    arguments = tensor_arguments(node)
    rule = rule_of(node)
    if rule is None:
        return []
    factors = {dims[0] for a, dims in zip(arguments, rule.inputs) if dims and tensor_of(a)[0] in made}
    is_rows = [bool(dims) and dims[0] in factors and dims[0] is not None for dims in rule.inputs]
    is_made = all(flag for a, flag in zip(arguments, is_rows) if tensor_of(a)[0] in made)
    makes = all(dims and dims[0] in factors for dims in rule.outputs)
    return is_rows if is_made and makes and any(is_rows) and row_factor(node, rule, is_rows) else []


def _rows_of_product(node: fx.Node) -> list[bool]:
    return [True, False, True] if node.target is autopar.grouped_mm.default else [True, True, True]


def _experts(node: fx.Node) -> int:
    weight = operand(node, 1).meta["val"] if node.target is autopar.grouped_mm.default else node.meta["val"]
    return weight.shape[0]


def _origin(node: fx.Node) -> object:
    """Return what tells a value from others: a view is told by what it views, as the backward makes views again."""
    if node.target in VIEWS:
        return (node.target, _origin(operand(node)), str(node.args[1:]))
    return node
