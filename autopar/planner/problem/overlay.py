"""Strategies that another graph may run with too: that of a smaller micro-batch, whose ops have the names of the
planned one's.

Uneven shards are legal for most ops, but not for all: a view that merges samples with another dim cuts them only where
the number of devices divides them, and no device may be left without any. So what is offered for 4 samples may not be
for 3.
"""

from __future__ import annotations

import numpy as np
from torch import fx

from ... import rules
from ...ir.graph import tensor_arguments, values_of
from ...ir.layout import is_legal
from ...ir.mesh import Mesh
from ...rules import Strategy
from .problem import Problem
from .vertices import Vertex


def fitting(problem: Problem, overlay: fx.Graph) -> dict[int, np.ndarray]:
    """Return, by class, a mask over its strategies: those that nodes of the same names in the graph `overlay` can
    follow."""
    nodes = {node.name: node for node in overlay.nodes}
    masks = {}
    for cls, options in problem.classes.items():
        v = problem.vertices[cls]
        node = nodes.get(v.node.name)
        if node is not None and v.kind != "parameter":
            masks[cls] = np.array([_fits(v, node, strategy, problem.mesh) for strategy in options.strategies])
    return masks


def _fits(v: Vertex, node: fx.Node, strategy: Strategy, mesh: Mesh) -> bool:
    if v.kind != "op":
        return is_legal(tuple(node.meta["val"].shape), strategy.outputs[0], mesh)
    if all(layout.is_replicated for layout in (*strategy.inputs, *strategy.outputs)):
        return True
    rule = rules.rule_of(node)
    shapes = [
        [tuple(x.shape) for x in values]
        for values in ([a.meta["val"] for a in tensor_arguments(node)], values_of(node))
    ]
    found = rule and rules.strategy_of(rule, strategy.choice, *shapes, mesh)
    return found is not None and (found.inputs, found.outputs) == (strategy.inputs, strategy.outputs)
