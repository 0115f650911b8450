"""Communication that runs while the graph computes: gradients reduced one bucket behind, parameters gathered one bucket
ahead.

A collective starts in one node and is waited for in another. The wait for a bucket of gradients, and what its result
goes through on its way out of the graph, comes just before the next bucket is packed: that costs nothing where nothing
can run beside compute, and even there processes that do not wait for each other wake up less often. The gather of a
bucket of parameters starts as soon as the one before it has arrived, and travels while that is computed with, where
that gains more than the bucket's memory. So at most one gather and one reduction are on their way beside a product, or
those together that no product is between, and little more memory is held than by waiting at once. The order of
collectives is the same on all ranks. Li et al., "PyTorch Distributed", VLDB 13(12), 2020, section 3.2.3; Zhao et al.,
"PyTorch FSDP", VLDB 16(12), 2023, section 3.3.

A tensor may take several collectives: over two axes one after the other, or over the tiers of links that one is taken
apart into (passes/distribute/by_tier.py). Where they run beside compute, each is a bucket apart from the next: the last
gather of a bucket, inside the nodes, travels together with the first of the one after it, across them. Elsewhere a
reduction goes on until its slowest step, across the nodes, has started, and the rest comes a bucket later.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import fx

from ..._torch import c10d
from ...ir.graph import operand, output_node
from .heavy_ops import is_product
from .partition import phase_of

aten = torch.ops.aten
ALL_REDUCES = (c10d.all_reduce.default, c10d.all_reduce_.default)
REDUCTIONS = (*ALL_REDUCES, c10d.reduce_scatter_tensor.default, c10d.all_to_all_single.default)


def overlap(local: fx.GraphModule, gathers_ahead: bool) -> fx.GraphModule:
    """Move nodes of a local joint graph in place; nothing is computed that was not. Run it last. `gathers_ahead`:
    whether collectives run beside compute, and parameters are gathered a bucket ahead."""
    if gathers_ahead:
        gathers = gathers_of(local.graph)
        for phase in ("forward", "backward"):
            _gather_ahead([g for g in gathers if phase_of(g) == phase])
    _reduce_behind(local.graph, gathers_ahead)
    local.graph.lint()
    local.recompile()
    return local


def wait_of(start: fx.Node) -> fx.Node:
    """Return the node that waits for a collective."""
    return next(iter(start.users))


def gathers_of(graph: fx.Graph) -> list[fx.Node]:
    """Return the collectives that wait for nothing but parameters, in order."""
    known: set[fx.Node] = set()
    for node in graph.nodes:
        is_parameter = node.op == "placeholder" and node.meta["role"].kind == "parameter"
        reads = node.all_input_nodes
        if is_parameter or node.op == "call_function" and reads and known.issuperset(reads):
            known.add(node)
    return [node for node in graph.nodes if node in known and node.meta.get("collective")]


def leading_out(graph: fx.Graph) -> set[fx.Node]:
    """Return the collectives whose results only leave the graph, by themselves or packed with others, and the ops on
    their way out."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        is_on_the_way = len(node.all_input_nodes) == 1 or node.target is aten.cat.default
        if node.op == "call_function" and is_on_the_way and node.users:
            if all(user.op == "output" or user in found for user in node.users):
                found.add(node)
    return found


def _gather_ahead(gathers: list[fx.Node]) -> None:
    """Move the gathers of a phase. The last collective of a tensor's starts as soon as that of the bucket before it has
    arrived, what it waits for a bucket earlier; where no product is between two, both start beside the one before."""
    starts, readers = set(gathers), defaultdict(list)
    ways = {start: _way_of(start, starts) for start in gathers}
    for start, way in ways.items():
        for node in way:
            if node.target is c10d.wait_tensor.default:
                readers[operand(node)].append(start)
    lasts = [start for start in gathers if not readers[start]]
    behind = _one_product_earlier(lasts)
    places = dict(zip(lasts, behind))  # the number of the bucket behind which a gather starts, -1 where it stays
    for start in reversed(gathers):
        if readers[start]:
            first = min(places[reader] for reader in readers[start])
            places[start] = max(behind[first], 0) if first >= 0 else -1  # or together with what waits for it
    for i, before in enumerate(lasts):
        anchor = wait_of(before)
        order = {node: place for place, node in enumerate(anchor.graph.nodes)}
        moved = [ways[start] for start in gathers if places[start] == i]
        for node in sorted(set().union(*moved), key=order.__getitem__):
            if order[node] > order[wait_of(before)]:
                anchor.append(node)
                anchor = node


def _one_product_earlier(gathers: list[fx.Node]) -> list[int]:
    """Return, for each gather, the latest one before it that has arrived a product earlier, -1 if none has."""
    if not gathers:
        return []
    waits, products, counts = {wait_of(start) for start in gathers}, 0, {}
    for node in gathers[0].graph.nodes:
        products += is_product(node)
        if node in waits:
            counts[node] = products
    made = [counts[wait_of(start)] for start in gathers]
    return [bisect_left(made, count) - 1 for count in made]


def _way_of(start: fx.Node, gathers: set[fx.Node]) -> set[fx.Node]:
    """Return a gather with the ops between parameters, or the collectives before it, and itself; the waits for those
    are among them."""
    way, left = {start}, list(start.all_input_nodes)
    while left:
        node = left.pop()
        if node.op == "call_function" and node not in way:
            way.add(node)
            if not (node.target is c10d.wait_tensor.default and operand(node) in gathers):
                left += node.all_input_nodes
    return way


def _reduce_behind(graph: fx.Graph, by_step: bool) -> None:
    """Let what follows on a reduction wait until the next one is packed: each of its steps for another one `by_step`,
    else all that follows on the slowest."""
    leaving, order = leading_out(graph), {node: i for i, node in enumerate(graph.nodes)}
    starts = [node for node in graph.nodes if node in leaving and node.meta.get("collective")]
    waited = _waited_later(starts, by_step)
    behind: set[fx.Node] = set()  # what follows on a collective
    for node in graph.nodes:
        if node in leaving and (node.target is c10d.wait_tensor.default or not behind.isdisjoint(node.all_input_nodes)):
            behind.add(node)
    anchors = sorted((_packed(s) for s in starts if s not in behind and s.target in REDUCTIONS), key=order.__getitem__)
    places = [order[anchor] for anchor in anchors]
    products = [order[node] for node in graph.nodes if is_product(node)] if by_step else []

    def later(place: int) -> int:
        """Return the number of the first reduction that is packed behind a place, a product later if there is one."""
        found = bisect_right(places, place)
        at = bisect_right(products, place)
        return max(found, bisect_right(places, products[at])) if at < len(products) else found

    slots: dict[fx.Node, int] = {}  # of what moves: the number of the reduction before which it comes
    for node in graph.nodes:
        if node not in behind:
            continue
        reads = node.all_input_nodes
        moved = [slots[a] for a in reads if a in slots]
        if node.target is c10d.wait_tensor.default and operand(node) in waited:
            at_end = moved == [len(places)]
            slots[node] = len(places) if at_end else later(places[moved[0]] if moved else order[operand(node)])
        elif moved:
            slots[node] = max(moved + [bisect_right(places, order[a]) for a in reads if a not in slots])
    for node, slot in slots.items():
        (anchors[slot] if slot < len(anchors) else output_node(graph)).prepend(node)


def _waited_later(starts: Iterable[fx.Node], by_step: bool) -> set[fx.Node]:
    """Return the collectives on the way out that are not waited for at once: all of them `by_step`, else the slowest of
    each that was taken apart into tiers, and of several the last."""
    units = defaultdict(list)
    for start in starts:
        units[start.meta.get("by_tier", start.name)].append(start)
    if by_step:
        return {start for unit in units.values() for start in unit if unit[0].target in REDUCTIONS}
    found = set()
    for unit in units.values():
        if unit[0].target in REDUCTIONS and not _goes_on(unit):
            found.add(next((s for s in unit if s.target in ALL_REDUCES), unit[-1]))
    return found


def _goes_on(unit: list[fx.Node]) -> bool:
    """Return whether other collectives wait for those of a unit."""
    left, seen = [wait_of(unit[-1])], set()
    while left:
        node = left.pop()
        if node.meta.get("collective"):
            return True
        if node not in seen:
            seen.add(node)
            left += node.users
    return False


def _packed(start: fx.Node) -> fx.Node:
    """Return the node where what a collective sends is packed."""
    sent = operand(start)
    return sent if sent.op == "call_function" and len(sent.users) == 1 else start
