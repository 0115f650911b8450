"""Take out of a stage's forward what every micro-batch would compute alike: parameters in the type that they compute in.

A step's micro-batches read the same weights. Cast in each of them, every micro-batch in flight would keep a copy of its own.
"""

from __future__ import annotations

import torch
from torch import fx

from ..graph import OutputRole, Role, output_node
from .partition import extract

CAST = torch.ops.aten._to_copy.default


def compute_once(forward: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule | None]:
    """(the forward, which takes the copies as placeholders of role "copy", the graph that makes them from parameters), or the
    forward as it is and None if it makes none."""
    placeholders = [n for n in forward.graph.nodes if n.op == "placeholder"]
    copies = [n for n in forward.graph.nodes if _is_cast(n)]
    if not copies:
        return forward, None
    output = output_node(forward.graph)
    rest = extract(forward, [*placeholders, *copies], list(output.args[0]), list(output.meta["roles"]))
    for node in rest.graph.nodes:
        if node.op == "placeholder" and node.name in {n.name for n in copies}:
            node.meta["role"] = Role("copy", node.name)
    sources = list(dict.fromkeys(n.args[0] for n in copies))
    return rest, extract(forward, sources, copies, [OutputRole("copy", n.name) for n in copies])


def _is_cast(node: fx.Node) -> bool:
    if node.target is not CAST or set(node.kwargs) - {"dtype"} or node.args[0].op != "placeholder":
        return False
    return node.args[0].meta["role"].kind == "parameter"
