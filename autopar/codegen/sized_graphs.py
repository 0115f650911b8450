"""The joint graphs of a call at any sizes of some dims, from those that were captured at a few.

Such a graph is what tracing the call at these sizes would give, for the compiler to lower: its numbers and the shapes
of its values are on the lines of those that are known (see follow_size.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .._torch import fake_tensor, graph_module, is_fake, tree_map
from ..ir.graph import values_of
from ..ops.counter_rng import contiguous_strides
from .follow_size import Differs, Line, Sizes, follow


class SizedGraphs:
    """The graphs at all sizes that the `lines` serve, given those at some. Raises Differs where they differ in more
    than numbers on lines."""

    def __init__(self, graphs: Mapping[Sizes, fx.GraphModule]):
        self.newest = graphs[max(graphs)]
        self.lines: set[Line] = set()
        nodes = {sizes: list(module.graph.nodes) for sizes, module in graphs.items()}
        if len({len(found) for found in nodes.values()}) > 1:
            raise Differs("the captures have other ops at other sizes")
        places = {sizes: {node: at for at, node in enumerate(found)} for sizes, found in nodes.items()}
        self.made = [self._template(dict(zip(graphs, of_one)), graphs, places) for of_one in zip(*nodes.values())]

    def _template(self, nodes: Mapping[Sizes, fx.Node], graphs: Mapping[Sizes, fx.GraphModule], places: Mapping):
        """Return (args, kwargs, forms of the values) of one node, with lines in the place of numbers that change."""
        first, *others = nodes.values()
        if any((n.op, n.target, n.name) != (first.op, first.target, first.name) for n in others):
            raise Differs(f"{first.name} and {others[-1].name} in one place")
        if first.op == "get_attr":
            one, *more = (getattr(module, str(first.target)) for module in graphs.values())
            if isinstance(one, torch.Tensor) and not all(one.shape == o.shape and torch.equal(one, o) for o in more):
                raise Differs(f"the constant {first.target} has other values at other sizes")

        def one_node(found: Sequence[fx.Node]) -> fx.Node:
            if len({places[sizes][node] for sizes, node in zip(nodes, found)}) > 1:
                raise Differs(f"{found[0].name} and {found[-1].name} in one place")
            return found[[*nodes].index(max(nodes))]

        try:
            args = follow({sizes: n.args for sizes, n in nodes.items()}, self._line, one_node)
            kwargs = follow({sizes: dict(n.kwargs) for sizes, n in nodes.items()}, self._line, one_node)
            forms = follow({sizes: [_form(v) for v in values_of(n)] for sizes, n in nodes.items()}, self._line)
        except Differs as reason:
            raise Differs(f"{first.name}: {reason}") from None
        return args, kwargs, forms

    def _line(self, line: Line) -> Line:
        self.lines.add(line)
        return line

    def at(self, sizes: Sizes) -> fx.GraphModule:
        """Return the graph at some sizes that all lines serve."""
        graph = fx.Graph()
        new: dict[fx.Node, fx.Node] = {}

        def number(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return new[value]
            if isinstance(value, (tuple, list)):
                return type(value)(map(number, value))
            if isinstance(value, dict):
                return {key: number(item) for key, item in value.items()}
            return value.at(sizes) if isinstance(value, Line) else value

        for node, (args, kwargs, forms) in zip(self.newest.graph.nodes, self.made):
            new[node] = graph.create_node(node.op, node.target, number(args), number(kwargs), node.name)
            new[node].meta = dict(node.meta)
            if node.op != "output" and forms:
                values = iter([_like(value, *number(form)) for value, form in zip(values_of(node), forms)])
                take = lambda value: next(values) if isinstance(value, torch.Tensor) else value  # noqa: E731, B023
                new[node].meta["val"] = tree_map(take, node.meta["val"])
        module = graph_module(self.newest, graph, type(self.newest).__name__)
        module.meta = dict(self.newest.meta)
        return module


def _form(value: torch.Tensor) -> tuple[list[int], list[int] | None]:
    """Return the shape of a value, and its strides if they are not those that follow from the shape."""
    return list(value.shape), None if value.is_contiguous() else list(value.stride())


def _like(value: torch.Tensor, shape: list[int], strides: list[int] | None) -> torch.Tensor:
    """Return a value without values of this form, or the one that has it already."""
    if list(value.shape) == shape:
        return value
    if is_fake(value):
        strides = contiguous_strides([max(size, 1) for size in shape]) if strides is None else strides
        mode = value.fake_mode  # type: ignore[attr-defined]
        return fake_tensor(mode, shape, strides, 0, value.dtype, value.device)
    return value.new_empty(shape) if strides is None else value.new_empty_strided(shape, strides)
