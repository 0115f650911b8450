"""Communication that runs while the graph computes: gradients reduced one bucket behind, parameters gathered one bucket
ahead.

A collective starts in one node and is waited for in another. The wait for a bucket of gradients, and what its result
goes through on its way out of the graph, comes just before the next bucket is packed: that costs nothing where nothing
can run beside compute, and even there processes that do not wait for each other wake up less often. The gather of a
bucket of parameters starts as soon as the one before it has arrived, and travels while that is computed with, where
that gains more than the bucket's memory. So at most one gather and one reduction are on their way at a time, and little
more memory is held than by waiting at once. The order of collectives is the same on all ranks. Li et al., "PyTorch
Distributed", VLDB 13(12), 2020, section 3.2.3; Zhao et al., "PyTorch FSDP", VLDB 16(12), 2023, section 3.3.
"""

from __future__ import annotations

from itertools import pairwise

from torch import fx

from ..._torch import c10d
from ...ir.graph import operand, output_node
from .partition import phase_of

REDUCTIONS = (
    c10d.all_reduce.default, c10d.all_reduce_.default, c10d.reduce_scatter_tensor.default,
    c10d.all_to_all_single.default,
)  # fmt: skip


def overlap(local: fx.GraphModule, gathers_ahead: bool) -> fx.GraphModule:
    """Move nodes of a local joint graph in place; nothing is computed that was not. Run it last. `gathers_ahead`:
    whether parameters are gathered a bucket ahead."""
    for phase in ("forward", "backward") if gathers_ahead else ():
        _gather_ahead(local.graph, phase)
    _reduce_behind(local.graph)
    local.graph.lint()
    local.recompile()
    return local


def wait_of(start: fx.Node) -> fx.Node:
    """Return the node that waits for a collective."""
    return next(iter(start.users))


def _gather_ahead(graph: fx.Graph, phase: str) -> None:
    gathers = []
    for node in graph.nodes:
        if (
            node.target is c10d.all_gather_into_tensor.default
            and phase_of(node) == phase
            and (way := _from_parameters(node))
        ):
            gathers.append((node, way))
    for (before, _), (start, way) in pairwise(gathers):
        order = {node: i for i, node in enumerate(graph.nodes)}
        anchor = wait_of(before)
        for node in sorted((*way, start), key=order.__getitem__):
            if order[node] > order[anchor]:
                anchor.append(node)
                anchor = node


def _from_parameters(start: fx.Node) -> set[fx.Node] | None:
    """Return the ops between parameters and a gather of them, and the gather; None if it gathers something else, or
    what another collective gives."""
    way, left = set(), list(start.all_input_nodes)
    while left:
        node = left.pop()
        if node.op == "placeholder":
            if node.meta["role"].kind != "parameter":
                return None
        elif node.op != "call_function" or node.target is c10d.wait_tensor.default:
            return None
        elif node not in way:
            way.add(node)
            left += node.all_input_nodes
    return way | {start}


def _reduce_behind(graph: fx.Graph) -> None:
    found = [
        (n, tail)
        for n in graph.nodes
        if n.target in REDUCTIONS and n.meta.get("collective") and (tail := _leading_out(n))
    ]
    order = {node: i for i, node in enumerate(graph.nodes)}
    for i, (start, tail) in enumerate(found):
        anchor = _packed(found[i + 1][0]) if i + 1 < len(found) else output_node(graph)
        for node in sorted(tail, key=order.__getitem__) if order[anchor] > order[start] else ():
            anchor.prepend(node)


def _leading_out(start: fx.Node) -> set[fx.Node] | None:
    """Return the wait for a collective and all that is made of its result; None if that is more than what leaves the
    graph."""
    tail, left = set(), [wait_of(start)]
    while left:
        node = left.pop()
        reads_more = any(a is not start and a not in tail for a in node.all_input_nodes)
        if reads_more or node.meta.get("collective"):
            return None
        tail.add(node)
        left += [user for user in node.users if user.op != "output"]
    return tail


def _packed(start: fx.Node) -> fx.Node:
    """Return the node where what a collective sends is packed."""
    sent = operand(start)
    return sent if sent.op == "call_function" and len(sent.users) == 1 else start
