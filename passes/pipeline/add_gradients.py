"""Let a stage's backward, or its weight part, add the gradients of parameters to sums over the micro-batches.

The first micro-batch's gradients become the sums. For those that follow each gradient is added where the graph has
computed it: a second set of all of a stage's gradients is never there.
"""

from __future__ import annotations

import torch
from torch import fx

from ..._torch import graph_module
from ...ir.graph import output_node

aten = torch.ops.aten


def add_gradients(backward: fx.GraphModule) -> fx.GraphModule:
    """Return the same graph, which takes a sum for each gradient of a parameter behind its other arguments, and returns
    it with the gradient added, in place."""
    graph, roles = fx.Graph(), output_node(backward.graph).meta["roles"]
    results = list(graph.graph_copy(backward.graph, {}))
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for at, role in enumerate(roles):
        if is_gradient(role):
            gradient = results[at]
            with graph.inserting_after(last):
                last = graph.placeholder(f"running_sum_{at}")
            with graph.inserting_after(gradient if gradient.op != "placeholder" else last):
                results[at] = graph.call_function(aten.add_.Tensor, (last, gradient))
            last.meta = {"val": gradient.meta["val"]}
            results[at].meta = dict(last.meta)
    graph.output(tuple(results)).meta["roles"] = list(roles)
    graph.lint()
    return graph_module(backward, graph, type(backward).__name__)


def is_gradient(role) -> bool:
    """Return whether an output of a stage's backward is the gradient of a parameter."""
    return role is not None and role.kind == "gradient"
