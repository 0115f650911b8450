"""Mark where rows may go to their experts and come back: `autopar::dispatch` and `combine` around each mixture of
experts.

Between them lie the products of one grouping, forward and backward, and all ops between those that treat rows alike
(gates, activations). Both change nothing: what they allow is another layout (autopar/rules/experts.py).

Where rows are copies of tokens and their results are added up again, weighted, tokens are dispatched instead
(`dispatch_tokens`) and sums come back (`combine_tokens`). The weights and what their gradients need of the results go
to the experts as well.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import fx

from ...ir.graph import call, is_op, is_tensor, mark_phases, operand, renumbered, tensor_arguments, tensor_of
from ...ops import autopar
from ...rules import rule_of
from ...rules.expert_rows import PRODUCTS, row_factor
from ...rules.lookup import forget_rows
from . import rows_of_tokens

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
        forget_rows(graph)  # rules were asked for while some groupings had not been dispatched yet
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
        self.inside: dict[fx.Node, list[bool]] = {node: rows_of_product(node) for node in products}  # which are rows
        self.dispatched: dict[object, fx.Node] = {}
        self.dtype = products[0].meta["val"].dtype
        self._add_between()
        self._add_before()

    def _add_between(self) -> None:
        """Find the ops that lead from one product's rows to another's, to sums of the rows of a token, and beside these
        to a number for each row, as the gradients of weights are."""
        made, found = {p for p in self.products if p.target is autopar.grouped_mm.default}, {}
        for node in self.graph.nodes:
            if not is_op(node) or node in self.products or not {tensor_of(a)[0] for a in tensor_arguments(node)} & made:
                continue
            is_rows = rows_of(node, made)
            if any(is_rows):
                found[node] = is_rows
                made.add(node)
        wanted = {tensor_of(a)[0] for p in self.products for a in tensor_arguments(p)}
        summed = {node for node in found if _is_summed(node)}
        if summed:
            wanted |= summed | {node for node in found if is_tensor(node) and _width(node) == 1}
        for node in reversed(found):
            if node in wanted:
                self.inside[node] = found[node]
                wanted |= {tensor_of(a)[0] for a in tensor_arguments(node)}

    def _add_before(self) -> None:
        """Find the ops between copies of tokens and what reads them, where all others of their rows are as small as a
        weight."""
        for node in reversed(self.graph.nodes):
            if is_op(node) and is_tensor(node) and node not in self.inside and self._is_read_inside_alone(node):
                is_rows = _copies_with_weights(node)
                if any(is_rows):
                    self.inside[node] = is_rows

    def _is_read_inside_alone(self, node: fx.Node) -> bool:
        def reads_rows(user: fx.Node) -> bool:
            arguments = tensor_arguments(user)
            return user in self.inside and all(f for a, f in zip(arguments, self.inside[user]) if a is node)

        return bool(node.users) and all(map(reads_rows, node.users))

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
        key: object = self.group if _origin(value) == _origin(self.group) else value
        copies = rows_of_tokens.copied(value)
        if _width(value) == 1 or copies is not None:
            key = _origin(value)  # weights and tokens: what the backward makes again is what the forward dispatched
        if key not in self.dispatched:
            if copies is not None:
                made = self._rows_of_tokens(copies.tokens(value), value)
            elif value.target is aten.index.Tensor and value.all_input_nodes[1:] == [self.group]:
                made = call(value, aten.index.Tensor, value.args[0], [self._rows(self.group)])
            else:
                made = call(value, autopar.dispatch.default, value, self.group, self.experts)
            made.meta["val"] = value.meta["val"]
            self.dispatched[key] = made
        return self.dispatched[key]

    def _rows_of_tokens(self, tokens: fx.Node, value: fx.Node) -> fx.Node:
        """Return the rows that tokens make, at their experts; sent in the narrower type that they had before a cast."""
        sent, wide = rows_of_tokens.narrowed(tokens)
        rows = call(value, autopar.dispatch_tokens.default, sent, self.group, self.experts)
        if wide is None:
            return rows
        rows.meta["val"] = value.meta["val"].to(sent.meta["val"].dtype)
        made = call(value, aten._to_copy.default, rows, dtype=wide)
        return made

    def _bring_back(self, value: fx.Node) -> None:
        others = [user for user in value.users if user not in self.inside]
        for user in list(others):
            if found := rows_of_tokens.sums(user, value):
                self._bring_back_sums(value, user.meta["val"].shape[1], found)
                others.remove(user)
        if others:
            with self.graph.inserting_after(value):
                back = call(value, autopar.combine.default, value, self.group, self.experts)
            back.meta["val"] = value.meta["val"]
            for user in others:
                user.replace_input_with(value, back)

    def _bring_back_sums(self, value: fx.Node, active: int, sums: list[fx.Node]) -> None:
        """Replace sums of the rows of each token by what comes back."""
        for node in sums:
            with self.graph.inserting_before(node):
                dtype = min(self.dtype, value.meta["val"].dtype, key=lambda d: d.itemsize)
                made = call(node, autopar.combine_tokens.default, value, self.group, self.experts, active, dtype)
                made.meta["val"] = node.meta["val"].reshape(-1, *value.meta["val"].shape[1:])
                if made.meta["val"].shape != node.meta["val"].shape:
                    shaped = call(node, aten.unsqueeze.default, made, 1)
                    shaped.meta["val"], made = node.meta["val"], shaped
            node.replace_all_uses_with(made)


def _is_summed(node: fx.Node) -> bool:
    """Return whether rows are added up in their tokens."""
    return is_tensor(node) and any(rows_of_tokens.sums(user, node) for user in node.users)


def _copies_with_weights(node: fx.Node) -> list[bool]:
    """Return which arguments of an op are rows, if some are copies of tokens, or made of such, and the others hold a
    number for each; none for any other op."""
    rule = rule_of(node)
    arguments = tensor_arguments(node)
    if rule is None or not rule.outputs or not rule.outputs[0] or rule.outputs[0][0] is None:
        return []
    factor = rule.outputs[0][0]
    is_rows = [bool(dims) and dims[0] == factor for dims in rule.inputs]
    rows = [a for a, flag in zip(arguments, is_rows) if flag]
    if row_factor(node, rule, is_rows) != factor:
        return []
    made = [a for a in rows if rows_of_tokens.copied(a) is not None or is_op(a) and any(_copies_with_weights(a))]
    return is_rows if made and all(a in made or _width(a) == 1 for a in rows) else []


def _width(node: fx.Node) -> int:
    """Return the elements of a row."""
    return node.meta["val"][0].numel() if node.meta["val"].dim() and len(node.meta["val"]) else 0


def rows_of(node: fx.Node, made: set[fx.Node]) -> list[bool]:
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


def rows_of_product(node: fx.Node) -> list[bool]:
    """Return which arguments of a product are rows."""
    return [True, False, True] if node.target is autopar.grouped_mm.default else [True, True, True]


def _experts(node: fx.Node) -> int:
    weight = operand(node, 1).meta["val"] if node.target is autopar.grouped_mm.default else node.meta["val"]
    return weight.shape[0]


def _origin(node: fx.Node) -> object:
    """Return what tells a value from others: a view is told by what it views, as the backward makes views again."""
    if node.target in VIEWS:
        return (node.target, _origin(operand(node)), str(node.args[1:]))
    return node
