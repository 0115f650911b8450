"""Split from a joint graph what follows from its inputs alone: positions, shifted labels, masks, how many tokens count.

It is computed first, once for a row of tokens, so that a chunk of the row (passes/pipeline/sequence_chunks.py) reads
its own part of it whatever ops it takes to make.
"""

from __future__ import annotations

from torch import fx

from ..._torch import graph_module
from ...ir.graph import OutputRole, Role, is_op, is_tensor, leaf_name, output_node
from ...ops.streams import stream_of

GIVEN = ("input", "total")  # kinds of leaves that are known before a micro-batch runs


def known_first(joint: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return (the graph that makes what is known, the joint graph that reads it). The first takes the leaves of GIVEN
    by the names of their placeholders, and gives, with the names of placeholders of the second as roles, all that this
    reads: leaves themselves, and made tensors in the place of the ops that made them."""
    known = _known(joint.graph)
    read = [node for node in joint.graph.nodes if node in known and _is_leaf(node, known)]
    rest, names = _rest(joint, known, read)
    return _first(joint, known, read, names), rest


def _known(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that follow from inputs and constants alone."""
    known: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" and node.meta["role"].kind in GIVEN or node.op == "get_attr":
            known.add(node)
        elif node.op == "call_function" and stream_of(node) is None and known.issuperset(node.all_input_nodes):
            known.add(node)
    return known


def _is_leaf(node: fx.Node, known: set[fx.Node]) -> bool:
    """Return whether what is not known reads a known node, which is no single number: those stay constants."""
    if all(user in known for user in node.users) or not is_tensor(node):
        return False
    return node.op == "placeholder" or bool(node.meta["val"].dim()) or _has_inputs(node)


def _has_inputs(node: fx.Node) -> bool:
    """Return whether a known node follows from an input."""
    stack, seen = [node], set[fx.Node]()
    while stack:
        one = stack.pop()
        if one.op == "placeholder":
            return True
        stack += [a for a in one.all_input_nodes if a not in seen]
        seen.update(one.all_input_nodes)
    return False


def _rest(joint: fx.GraphModule, known: set[fx.Node], read: list[fx.Node]) -> tuple[fx.GraphModule, dict[fx.Node, str]]:
    """Return the joint graph that reads leaves, and the names of those."""
    graph, new, names = fx.Graph(), dict[fx.Node, fx.Node](), dict[fx.Node, str]()
    for node in joint.graph.find_nodes(op="placeholder"):
        if node not in known or node in read:
            new[node] = graph.node_copy(node)
    for node in (node for node in read if node.op != "placeholder"):
        role = Role("input", f"known.{node.name}")
        new[node] = graph.placeholder(leaf_name(role))
        new[node].meta = {**node.meta, "role": role, "phase": "forward"}
    for node in read:
        names[node] = new[node].name
    for node in joint.graph.nodes:
        if node not in new:
            new[node] = graph.node_copy(node, new.__getitem__)
    for node in reversed(graph.nodes):
        if is_op(node) and not node.users or node.op == "get_attr" and not node.users:
            graph.erase_node(node)
    return graph_module(joint, graph, "Rest"), names


def _first(
    joint: fx.GraphModule, known: set[fx.Node], read: list[fx.Node], names: dict[fx.Node, str]
) -> fx.GraphModule:
    """Return the graph that makes the leaves."""
    needed, stack = set[fx.Node](), [*read]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in joint.graph.nodes:
        if node in needed:
            new[node] = graph.node_copy(node, new.__getitem__)
    output = graph.output(tuple(new[node] for node in read))
    output.meta["roles"] = [OutputRole("output", names[node]) for node in read]
    assert output is output_node(graph)
    return graph_module(joint, graph, "Known")
