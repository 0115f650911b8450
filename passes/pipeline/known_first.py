"""Split from a joint graph what follows from its inputs alone: positions, shifted labels, masks, how many tokens count.

It is computed first, once for a row of tokens, so that a chunk of the row (passes/pipeline/sequence_chunks.py) reads
its own part of it whatever ops it takes to make. Whole numbers take little memory; numbers that follow from them, such
as rotary embeddings, take more and are made chunk by chunk where the ops that make them allow that.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from ..._torch import graph_module
from ...ir.graph import OutputRole, Role, is_op, is_tensor, leaf_name, outputs_of, values_of
from ...ops.streams import stream_of

GIVEN = ("input", "total")  # kinds of leaves that are known before a micro-batch runs
MADE, KEYS = "known.", ".keys"  # of the names of leaves that were ops, and of those that are read of keys


def known_first(joint: fx.GraphModule, numbers: bool) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return (the graph that makes what is known, the joint graph that reads it). The first takes the leaves of GIVEN
    by the names of their placeholders, and gives, with the names of placeholders of the second as roles, all that this
    reads: leaves themselves, and made tensors in the place of the ops that made them. `numbers`: in floating point
    too, not integers and booleans alone."""
    known = _known(joint.graph, numbers)
    read = [node for node in joint.graph.nodes if node in known and _is_leaf(node, known)]
    rest, names = _rest(joint, known, read)
    return _first(joint, known, read, names), rest


def known_by(role: Role) -> tuple[str, str] | None:
    """Return what a leaf is that stands for an op, and the name of that op's node; None for others."""
    if role.kind != "input" or not role.name.startswith(MADE):
        return None
    name = role.name.removeprefix(MADE)
    return ("known keys", name.removesuffix(KEYS)) if name.endswith(KEYS) else ("known", name)


def of_no_input(known: fx.Graph) -> frozenset[str]:
    """Return the names of leaves, of the graph that makes them, that follow from no input."""
    return frozenset(role.name for value, role in outputs_of(known) if not _has_inputs(value))


def _known(graph: fx.Graph, numbers: bool) -> set[fx.Node]:
    """Return the nodes that follow from inputs and constants alone; without `numbers` only those of integers, booleans
    and single numbers, and what they follow from."""
    known: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" and node.meta["role"].kind in GIVEN or node.op == "get_attr":
            known.add(node)
        elif node.op == "call_function" and stream_of(node) is None and known.issuperset(node.all_input_nodes):
            known.add(node)
    if numbers:
        return known
    tables = _of_tables(graph, known)  # held once for all rows
    small = [n for n in known if n.op != "call_function" or not any(map(_is_large, values_of(n))) or _is_range(n)]
    return _needed(small) | tables


def _of_tables(graph: fx.Graph, known: set[fx.Node]) -> set[fx.Node]:
    """Return what follows from constants that are tables of numbers, and from no input."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "get_attr" and is_tensor(node) and _is_large(node.meta["val"]):
            found.add(node)
        elif node in known and not found.isdisjoint(node.all_input_nodes) and not _has_inputs(node):
            found |= _needed([node])
    return found


def _is_range(node: fx.Node) -> bool:
    """Return whether a node is numbers that are counted, one for each token."""
    return not node.all_input_nodes and all(value.dim() == 1 for value in values_of(node))


def _is_large(value: torch.Tensor) -> bool:
    return value.is_floating_point() and value.dim() > 0


def _needed(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return nodes and all that they follow from."""
    needed, stack = set[fx.Node](), [*nodes]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    return needed


def _is_leaf(node: fx.Node, known: set[fx.Node]) -> bool:
    """Return whether what is not known reads a known node, which is no single number: those stay constants."""
    if all(user in known for user in node.users) or not is_tensor(node):
        return False
    return node.op == "placeholder" or bool(node.meta["val"].dim()) or _has_inputs(node)


def _has_inputs(node: fx.Node) -> bool:
    """Return whether a known node follows from an input."""
    return any(one.op == "placeholder" for one in _needed([node]))


def _rest(joint: fx.GraphModule, known: set[fx.Node], read: list[fx.Node]) -> tuple[fx.GraphModule, dict[fx.Node, str]]:
    """Return the joint graph that reads leaves, and the names of those."""
    graph, new, names = fx.Graph(), dict[fx.Node, fx.Node](), dict[fx.Node, str]()
    for node in joint.graph.find_nodes(op="placeholder"):
        if node not in known or node in read:
            new[node] = graph.node_copy(node)
    for node in (node for node in read if node.op != "placeholder"):
        role = Role("input", f"{MADE}{node.name}")
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
    needed = _needed(read)
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in joint.graph.nodes:
        if node in needed:
            new[node] = graph.node_copy(node, new.__getitem__)
    graph.output(tuple(new[node] for node in read)).meta["roles"] = [OutputRole("output", names[node]) for node in read]
    return graph_module(joint, graph, "Known")
