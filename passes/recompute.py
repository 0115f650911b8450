"""Recomputation: the backward makes forward values again instead of reading saved ones.

A forward op that is computed again and that a backward op reads is copied into the backward, just before its first reader, with
everything that it needs and that is computed again as well. In a whole block that is all but what leaves the block: the next one
starts from there (Chen et al., arXiv 1604.06174). Redistributions are made again with what reads them, unless their copies are
kept; one that the backward makes anyway is made once: parameters gathered for what is computed again serve the backward's own
ops too.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from torch import fx

from ..graph import tensor_of
from .partition import phase_of

_BLOCK = re.compile(r"^(.*?\.?\d+)(?:\.|$)")


def recompute(local: fx.GraphModule, blocks: Collection[str], nodes: Collection[str] = ()) -> fx.GraphModule:
    """Rewrites a local joint graph in place; `blocks` are module paths such as "model.layers.3" of which all is computed again,
    `nodes` names of single ops."""
    if not blocks and not nodes:
        return local
    graph = local.graph
    inner = _inner(graph, blocks)
    for node in graph.nodes:
        is_copy = "tensor" in node.meta and not node.meta.get("kept") and phase_of(node) == "forward"
        if node.op == "call_function" and (is_copy or tensor_of(node)[0].name in nodes):
            inner.add(node)
    copies: dict[fx.Node, fx.Node] = {}

    def again(node: fx.Node) -> fx.Node:
        if node not in inner:
            return node
        if node not in copies:
            arguments = {a: again(a) for a in node.all_input_nodes}
            copies[node] = graph.node_copy(node, lambda a: arguments[a])
            copies[node].meta = dict(node.meta) | {"phase": "backward"}
            if node.meta.get("collective"):
                copies[node].meta["collective"] = replace(node.meta["collective"], phase="backward")
        return copies[node]

    for reader in list(graph.nodes):
        if reader.op != "call_function" or phase_of(reader) != "backward" or reader in copies.values():
            continue
        with graph.inserting_before(reader):
            for argument in reader.all_input_nodes:
                if (new := again(argument)) is not argument:
                    reader.replace_input_with(argument, new)
    _share(graph)
    graph.eliminate_dead_code()
    graph.lint()
    local.recompile()
    return local


def _share(graph: fx.Graph) -> None:
    """Redistributions of one tensor to one layout in the backward become the first of them."""
    first: dict[tuple, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op == "call_function" and "tensor" in node.meta and phase_of(node) == "backward":
            same = first.setdefault((node.target, node.args, tuple(node.kwargs.items())), node)
            if same is not node:
                node.replace_all_uses_with(same)
                graph.erase_node(node)


def _inner(graph: fx.Graph, blocks: Collection[str]) -> set[fx.Node]:
    """Forward nodes of the blocks whose value no forward op of another block reads."""
    home = {}
    for node in graph.nodes:
        if node.op == "call_function" and phase_of(node) == "forward":
            match = _BLOCK.match(node.meta.get("module", ""))
            home[node] = match.group(1) if match and match.group(1) in blocks else ""
    leaving = set()
    for node, block in home.items():
        for user in node.users:
            if block and (user.op == "output" or (user in home and home[user] != block)):
                leaving.add(tensor_of(node)[0])
    return {n for n, block in home.items() if block and tensor_of(n)[0] not in leaving}
