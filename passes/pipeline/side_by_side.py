"""The forward of a micro-batch and the backward of the one before it as one graph: rows of experts of each travel while
the other computes.

Neither reads what the other makes, so any order that keeps both of their own is right. They take turns: each computes
up to where it would wait for rows, and waits for them when the other has come to such a place too; which of its waits
are such places the plan says (autopar/planner/objective/side_by_side.py). So whatever a graph computes between two of
them runs beside the rows of the other one, and the order of collectives follows from the two graphs and the plan, which
are alike on the ranks of an axis. Where one has come to its end the other goes on alone. DeepSeek-V3 (arXiv
2412.19437), section 3.2.1, pairs chunks so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import reduce
from itertools import zip_longest
from typing import cast

import torch
from torch import fx

from ..._torch import c10d, graph_module
from ...ir.graph import output_node
from ...ops import autopar

BEFORE = "before_"  # begins the names of what belongs to the micro-batch before
OF_FORWARD = "of_forward"  # in the meta of the output node: how many of the results are the forward's


def side_by_side(forward: fx.GraphModule, backward: fx.GraphModule, exchanges: Collection[str]) -> fx.GraphModule:
    """Return a graph that takes the arguments of a forward, then those of a backward of another micro-batch, and
    returns the results of both in this order. Names of the backward begin with BEFORE. `exchanges`: ops at whose waits
    for rows turns end."""
    writer = _Writer(forward, backward)
    both = (turns(module.graph, exchanges) for module in (forward, backward))
    for of_forward, of_backward in zip_longest(*both, fillvalue=()):
        writer.copy(of_forward, forward)
        writer.copy(of_backward, backward)
    return writer.written()


def turns(graph: fx.Graph, exchanges: Collection[str]) -> Iterator[list[fx.Node]]:
    """Iterate over what a graph computes, cut before each wait for the rows of some exchanges."""
    turn: list[fx.Node] = []
    waits = {wait for node in graph.nodes if (wait := _wait_for_rows(node, exchanges)) is not None}
    for node in graph.nodes:
        if node in waits:
            yield turn
            turn = []
        if node.op not in ("placeholder", "output"):
            turn.append(node)
    yield turn


def results_of_forward(graph: fx.Graph) -> int:
    """Return how many of the results of a graph are a forward's, 0 if it was not made of two."""
    return output_node(graph).meta.get(OF_FORWARD, 0)


def _wait_for_rows(start: fx.Node, exchanges: Collection[str]) -> fx.Node | None:
    """Return the node that waits for the rows that `start` sends for one of some exchanges, None if it does not."""
    if start.target is not autopar.exchange_rows.default or start.meta["collective"].tensor not in exchanges:
        return None
    return next((user for user in start.users if user.target is c10d.wait_tensor.default), None)


class _Writer:
    """Copies nodes of two graphs into one."""

    def __init__(self, forward: fx.GraphModule, backward: fx.GraphModule):
        self.forward, self.backward, self.graph = forward, backward, fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        self.constants: dict[str, object] = {}
        for module in (forward, backward):
            for node in module.graph.find_nodes(op="placeholder"):
                name = self._name(node, module)
                self._take(node, self.graph.create_node("placeholder", name, (), {}, name))

    def copy(self, nodes: Sequence[fx.Node], module: fx.GraphModule) -> None:
        """Copy nodes of one of the graphs behind all others."""
        for node in nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), self.new.__getitem__)
            target = self._constant(node, module) if node.op == "get_attr" else node.target
            self._take(node, self.graph.create_node(node.op, target, args, kwargs, self._name(node, module)))

    def written(self) -> fx.GraphModule:
        """Return the graph with the outputs of both."""
        outputs = [output_node(module.graph) for module in (self.forward, self.backward)]
        results = [fx.map_arg(tuple(cast(Sequence, output.args[0])), self.new.__getitem__) for output in outputs]
        made = self.graph.output(sum(results, ()))
        made.meta |= {"roles": [role for o in outputs for role in o.meta["roles"]], OF_FORWARD: len(results[0])}
        self.graph.lint()
        module = graph_module(self.constants or torch.nn.Module(), self.graph, type(self.forward).__name__)
        module.meta |= self.forward.meta
        return module

    def _take(self, node: fx.Node, made: fx.Node) -> None:
        made.meta, self.new[node] = dict(node.meta), made

    def _name(self, node: fx.Node, module: fx.GraphModule) -> str:
        return node.name if module is self.forward else BEFORE + node.name

    def _constant(self, node: fx.Node, module: fx.GraphModule) -> str:
        """Return where a constant lies; both graphs have the same one in one place."""
        value, target = reduce(getattr, str(node.target).split("."), module), str(node.target)
        known = self.constants.setdefault(target, value)
        if known is not value:
            target = BEFORE + target.replace(".", "_")
            self.constants[target] = value
        return target
