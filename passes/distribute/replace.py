"""Put new ops in the place of several of a local graph, with the bookkeeping of that."""

from __future__ import annotations

from torch import fx


def origin(node: fx.Node) -> dict:
    """Return what a new op takes over from one in whose place it stands: where that comes from."""
    return {key: node.meta[key] for key in ("phase", "module", "source") if key in node.meta}


def replace(old: fx.Node, new: fx.Node) -> None:
    """Let all readers of a node read another one that holds the same tensor."""
    new.meta = {**{k: v for k, v in old.meta.items() if k != "sharding"}, "val": new.meta["val"]}
    old.replace_all_uses_with(new)


def move_before(place: fx.Node, node: fx.Node) -> None:
    """Move a node, and what it needs, before a place that does not depend on it, where it is not already."""
    order = {n: i for i, n in enumerate(place.graph.nodes)}
    late, stack = set(), [node]
    while stack:
        one = stack.pop()
        if one not in late and order[one] > order[place]:
            late.add(one)
            stack.extend(one.all_input_nodes)
    for one in sorted(late, key=order.__getitem__):
        place.prepend(one)
