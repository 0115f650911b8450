"""Take out of a stage's forward what every micro-batch would compute alike: copies of parameters.

A step's micro-batches read the same weights. Two kinds of copies are made once for all of them, before the first
forward, and held to the end of the step: parameters in the type that they compute in, and gathered parameters that the
plan keeps for the backward (ZeRO-1 and 2; Rajbhandari et al., arXiv 1910.02054), with the collectives that they come
through. Gathered in each forward, every micro-batch in flight would hold copies of its own. What the backward gathers
again (ZeRO-3) stays where it is.
"""

from __future__ import annotations

import torch
from torch import fx

from ...ir.graph import OutputRole, Role, operand, output_node
from ..distribute.partition import extract

CAST = torch.ops.aten._to_copy.default


def compute_once(forward: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule | None]:
    """Return (the forward, which takes the copies as placeholders of role "copy", the graph that makes them from
    parameters), or the forward as it is and None if it makes none. Both keep the order of their collectives."""
    output, placeholders = output_node(forward.graph), [n for n in forward.graph.nodes if n.op == "placeholder"]
    alone = _of_parameters_alone(forward.graph)
    gathered = {n for n in alone if n.meta.get("kept")}
    needed = _needed(output.all_input_nodes, gathered)  # what is left when those are there
    copies = [n for n in forward.graph.nodes if n in needed and (n in gathered or n in alone and _is_cast(n))]
    if not copies:
        return forward, None
    rest = extract(forward, [*placeholders, *copies], list(output.args[0]), list(output.meta["roles"]))
    names = {n.name for n in copies}
    for node in rest.graph.nodes:
        if node.op == "placeholder" and node.name in names:
            node.meta["role"] = Role("copy", node.name)
    made_of = _needed(copies, set())
    sources = [n for n in placeholders if n in made_of]
    return rest, extract(forward, sources, copies, [OutputRole("copy", n.name) for n in copies])


def _of_parameters_alone(graph: fx.Graph) -> set[fx.Node]:
    """Return the ops that read nothing but parameters and what follows from them."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        sources = node.all_input_nodes
        if node.op == "call_function" and sources and all(n in found or _is_parameter(n) for n in sources):
            found.add(node)
    return found


def _is_parameter(node: fx.Node) -> bool:
    return node.op == "placeholder" and node.meta["role"].kind == "parameter"


def _is_cast(node: fx.Node) -> bool:
    return node.target is CAST and not set(node.kwargs) - {"dtype"} and operand(node).op == "placeholder"


def _needed(values: list[fx.Node], given: set[fx.Node]) -> set[fx.Node]:
    """Return the values and all that they are made of, but for what only given ones are made of."""
    found, left = set(), list(values)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += [] if node in given else node.all_input_nodes
    return found
