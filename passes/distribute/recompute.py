"""Recomputation: the backward makes forward values again instead of reading saved ones.

A forward op that is computed again and that a backward op reads is copied into the backward, just before its first
reader, with everything that it needs and that is computed again as well. In a whole block that is all but what leaves
the block: the next one starts from there (Chen et al., arXiv 1604.06174). Redistributions are made again with what
reads them, unless their copies are kept; one that the backward makes anyway is made once: parameters gathered for what
is computed again serve the backward's own ops too.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import fx

from ...ir.graph import tensor_of
from .partition import phase_of


def recompute(local: fx.GraphModule, ops: Collection[str], reads_forward: bool = False) -> fx.GraphModule:
    """Rewrite a local joint graph in place; `ops`: names of the forward ops that are computed again. `reads_forward`:
    the backward may read the forward's copies of tensors where the plan keeps none (passes/distribute/tile.py)."""
    if not ops and not reads_forward:
        return local
    graph, inner = local.graph, set()
    for node in graph.nodes:
        is_copy = "tensor" in node.meta and not node.meta.get("kept") and phase_of(node) == "forward"
        made_by = node.meta.get("part_of", tensor_of(node)[0].name)
        if node.op == "call_function" and (is_copy or made_by in ops and phase_of(node) == "forward"):
            inner.add(node)
    copies: dict[fx.Node, fx.Node] = {}

    def recomputed(node: fx.Node) -> fx.Node:
        if node not in inner:
            return node
        if node not in copies:
            arguments = {a: recomputed(a) for a in node.all_input_nodes}
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
                if (new := recomputed(argument)) is not argument:
                    reader.replace_input_with(argument, new)
    _share(graph)
    graph.eliminate_dead_code()
    graph.lint()
    local.recompile()
    return local


def _share(graph: fx.Graph) -> None:
    """Replace redistributions of one tensor to one layout in the backward by the first of them."""
    first: dict[tuple, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op == "call_function" and "tensor" in node.meta and phase_of(node) == "backward":
            same = first.setdefault((node.target, node.args, tuple(node.kwargs.items())), node)
            if same is not node:
                node.replace_all_uses_with(same)
                graph.erase_node(node)
