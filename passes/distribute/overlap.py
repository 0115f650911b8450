"""Communication that runs while the graph computes: gradients reduced one bucket behind, parameters gathered one bucket
ahead.

A collective starts in one node and is waited for in another. The wait for a bucket of gradients, and what its result
goes through on its way out of the graph, comes just before the next bucket is packed: that costs nothing where nothing
can run beside compute, and even there processes that do not wait for each other wake up less often. The gather of a
bucket of parameters starts as soon as the one before it has arrived, and travels while that is computed with, where
that gains more than the bucket's memory. So at most one gather and one reduction are on their way at a time, and little
more memory is held than by waiting at once. The order of collectives is the same on all ranks. Li et al., "PyTorch
Distributed", VLDB 13(12), 2020, section 3.2.3; Zhao et al., "PyTorch FSDP", VLDB 16(12), 2023, section 3.3.

The collectives that one is taken apart into, a tier of links each (passes/distribute/by_tier.py), move as one. Where
they run beside compute, each is a bucket apart from the next: the last gather of a bucket, inside the nodes, travels
together with the first of the one after it, across them. Elsewhere a reduction goes on until its slowest step, across
the nodes, has started, and the rest comes a bucket later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from torch import fx

from ..._torch import c10d
from ...ir.graph import operand, output_node
from .partition import phase_of

GATHER = c10d.all_gather_into_tensor.default
ALL_REDUCES = (c10d.all_reduce.default, c10d.all_reduce_.default)
REDUCTIONS = (*ALL_REDUCES, c10d.reduce_scatter_tensor.default, c10d.all_to_all_single.default)


def overlap(local: fx.GraphModule, gathers_ahead: bool) -> fx.GraphModule:
    """Move nodes of a local joint graph in place; nothing is computed that was not. Run it last. `gathers_ahead`:
    whether collectives run beside compute, and parameters are gathered a bucket ahead."""
    for phase in ("forward", "backward") if gathers_ahead else ():
        _gather_ahead(local.graph, phase)
    _reduce_behind(local.graph, gathers_ahead)
    local.graph.lint()
    local.recompile()
    return local


def wait_of(start: fx.Node) -> fx.Node:
    """Return the node that waits for a collective."""
    return next(iter(start.users))


def _units(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return the collectives of a graph in order, those together that one was taken apart into."""
    found = defaultdict(list)
    for node in graph.nodes:
        if node.meta.get("collective"):
            found[node.meta.get("by_tier", node.name)].append(node)
    return list(found.values())


def _gather_ahead(graph: fx.Graph, phase: str) -> None:
    gathers, ends = [], []
    for starts in _units(graph):
        is_gather = starts[0].target is GATHER and phase_of(starts[0]) == phase
        if is_gather and (way := _from_parameters(starts[0])):
            gathers.append([way, *({wait_of(before), start} for before, start in pairwise(starts))])
            ends.append(wait_of(starts[-1]))
    for i, anchor in enumerate(ends):
        order = {node: place for place, node in enumerate(graph.nodes)}
        for j, steps in enumerate(gathers[i + 1 :], start=i + 1):
            # the last step of the next gather, the last but one of the next but one
            moved = [step for k, step in enumerate(steps) if max(0, j - len(steps) + k) == i]
            for node in sorted(set().union(*moved), key=order.__getitem__):
                if order[node] > order[ends[i]]:
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


def _reduce_behind(graph: fx.Graph, by_step: bool) -> None:
    """Let what follows on a reduction wait until the next one is packed: each of its steps for another one `by_step`,
    else all that follows on the slowest."""
    found: list[tuple[fx.Node, list[fx.Node], list[set[fx.Node]]]] = []
    for unit in _units(graph):
        borders = unit if by_step else [next((s for s in unit if s.target in ALL_REDUCES), unit[-1])]
        tails_or_none = [_leading_out(s, unit) for s in borders if unit[0].target in REDUCTIONS]
        tails = [tail for tail in tails_or_none if tail]
        if len(tails) == len(borders):
            found.append((unit[0], borders, tails))
    order = {node: i for i, node in enumerate(graph.nodes)}
    packs = [_packed(start) for start, _, _ in found]
    for i, (_, borders, tails) in enumerate(found):
        for j, (border, tail, rest) in enumerate(zip(borders, tails, [*tails[1:], set()]), start=i + 1):
            anchor = packs[j] if j < len(packs) else output_node(graph)
            for node in sorted(tail - rest, key=order.__getitem__) if order[anchor] > order[border] else ():
                anchor.prepend(node)


def _leading_out(start: fx.Node, unit: Sequence[fx.Node]) -> set[fx.Node] | None:
    """Return the wait for a collective of a unit and all that is made of its result; None if that is more than what
    leaves the graph."""
    tail, left = set(), [wait_of(start)]
    while left:
        node = left.pop()
        reads_more = any(a is not start and a not in tail for a in node.all_input_nodes)
        if reads_more or node.meta.get("collective") and node not in unit:
            return None
        tail.add(node)
        left += [user for user in node.users if user.op != "output"]
    return tail


def _packed(start: fx.Node) -> fx.Node:
    """Return the node where what a collective sends is packed."""
    sent = operand(start)
    return sent if sent.op == "call_function" and len(sent.users) == 1 else start
