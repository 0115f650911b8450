"""The graph of a micro-batch of a deep model, written out from that of its few blocks.

Equal blocks are cut along the samples alike. So a node of the whole graph becomes what its like in the compact graph
has become, and reads what the like of each of its arguments has become.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from ..._torch import graph_module
from ...frontend.repeated_blocks import BLOCKS, FIRST, LAST, Compact
from ...ir.graph import output_node

KEPT = ("phase", "source", "val")  # of the metadata, which readers of the few blocks have added to


def unroll_few(old: Compact, small: fx.GraphModule, whole: fx.GraphModule) -> fx.GraphModule | None:
    """Return the graph of one micro-batch of the graph `whole`, node for node the one that would be cut from it.
    `small`: what the compact graph `old` has become. None if `small` has nodes of its own beside sums over the batch,
    or reads others than the compact graph does."""
    if not _reads_alike(old.graph, small.graph):
        return None
    try:
        return graph_module(small, _Unrolled(old, small.graph).graph_of(whole.graph), "Local")
    except KeyError:  # a node reads what its like does not
        return None


def _reads_alike(before: fx.Graph, after: fx.Graph) -> bool:
    """Return whether every node of a micro-batch is one of the whole batch and reads the same nodes, or sums over the
    batch in place of them."""
    known = {node.name: node for node in before.nodes}
    totals = {node.name for node in after.find_nodes(op="placeholder")} - known.keys()
    for node in after.nodes:
        if node.name in totals:
            continue
        like = known.get(node.name)
        if like is None or like.op != node.op or like.op == "call_function" and like.target != node.target:
            return False
        ours, theirs = [*_read(node)], [*_read(like)]
        if len(ours) != len(theirs) or any(
            a.name != b.name and (a.name not in totals or node.op == "output") for a, b in zip(ours, theirs)
        ):
            return False
    return True


def _read(node: fx.Node) -> Iterator[fx.Node]:
    """Iterate over the nodes among the arguments, in order, each as often as it is read."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), found.append)
    return iter(found)


class _Unrolled:
    """Writes a graph. `like`: nodes of the compact graph by origin and number of the block; `small`: nodes of its
    micro-batch by name."""

    def __init__(self, old: Compact, small: fx.Graph):
        self.like = {key: node for node, key in old.origins.items()}
        self.small = {node.name: node for node in small.nodes}
        self.key = {node: key for key, node in old.whole.items()}
        self.count, self.graph = old.names.count, fx.Graph()
        self.made: dict[fx.Node, fx.Node] = {}
        names = {node.name for node in old.graph.nodes}
        self.totals = [node for node in small.find_nodes(op="placeholder") if node.name not in names]

    def graph_of(self, whole: fx.Graph) -> fx.Graph:
        """Write the micro-batch of a whole graph: leaves, then sums over the batch, then the rest."""
        for node in whole.find_nodes(op="placeholder"):
            self._leaf(node)
        for total in self.totals:
            self.made[total] = self.graph.node_copy(total)
        for node in whole.nodes:
            if node.op == "get_attr":
                self._leaf(node)
            elif node.op == "call_function":
                self._op(node)
        output = output_node(whole)
        new = self.graph.output(fx.node.map_arg(output.args[0], self.made.__getitem__))
        new.meta = {key: value for key, value in output.meta.items() if key != "val"}
        return self.graph

    def _like(self, node: fx.Node) -> fx.Node:
        """Return the node of the compact graph that is cut alike."""
        origin, number = self.key[node]
        if number > FIRST:
            number = max(LAST - 1, number - self.count + BLOCKS)
        return self.like[origin, number]

    def _leaf(self, node: fx.Node) -> None:
        small = self.small[self._like(node).name]
        target = node.target if node.op == "placeholder" else small.target
        self.made[node] = self.graph.create_node(node.op, target, (), {}, node.name)
        self.made[node].meta = {**node.meta, "val": small.meta["val"]}

    def _op(self, node: fx.Node) -> None:
        like = self._like(node)
        small = self.small.get(like.name)
        if small is None:  # nobody reads it
            return
        pairs = zip(_read(node), _read(like), _read(small), strict=True)
        read = iter([self.made[mine if its.name == new.name else new] for mine, its, new in pairs])
        args, kwargs = fx.node.map_arg((small.args, small.kwargs), lambda _: next(read))
        self.made[node] = self.graph.create_node("call_function", small.target, args, kwargs, node.name)
        self.made[node].meta = {key: small.meta[key] for key in KEPT} | {"module": node.meta.get("module", "")}
