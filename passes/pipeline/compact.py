"""The few blocks of a deep model's micro-batch, and which nodes of its whole graph they stand for.

Cutting a batch into micro-batches keeps the names of nodes, so what is known of the blocks of the whole batch's graph
is known of theirs. A total is before all blocks. What the split of a tail (passes/pipeline/tail.py) has put in the
place of a node, or behind it, is in the block of that node, and keys that are kept in that of their attention
(passes/pipeline/sequence_chunks.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from torch import fx

from ...frontend.repeated_blocks import Compact
from ...ir.graph import operand, outputs_of, tensor_of
from ...ops import autopar
from .known_first import known_by

Key = tuple[Hashable, int]  # origin and number of the block, as in Compact
Known = Mapping[str, tuple[object, Key]]  # by name of a node of the whole batch: its target and key


def few_of(old: Compact, small: fx.GraphModule) -> Compact:
    """Return the Compact of a micro-batch's graph of few blocks, while no node of its whole graph is known."""
    origins = {node: key or (node, 0) for node, key in _keys(_known(old.origins), small.graph).items()}
    return Compact(small, old.names, origins, {})


def compact_of(old: Compact, small: fx.GraphModule, whole: fx.GraphModule) -> Compact | None:
    """Return the Compact of a micro-batch's whole graph, with its graph of few blocks `small`; None if some node of
    `small` was not in the old one, or stands for one that `whole` lacks."""
    origins: dict[fx.Node, Key] = {}
    for node, key in _keys(_known(old.origins), small.graph).items():
        if key is None:
            return None
        origins[node] = key
    wanted = {origin for origin, _ in origins.values()}
    made = _keys(_known({node: key for key, node in old.whole.items()}), whole.graph)
    found = {key: node for node, key in made.items() if key is not None and key[0] in wanted}
    compact = Compact(small, old.names, origins, found)
    is_whole = all(key in found for origin, block in origins.values() for key in _stands_for(compact, origin, block))
    return compact if is_whole else None


def _known(keys: Mapping[fx.Node, Key]) -> Known:
    return {node.name: (node.target, key) for node, key in keys.items()}


def _keys(known: Known, graph: fx.Graph) -> dict[fx.Node, Key | None]:
    """Return the keys of all nodes of a micro-batch's graph, None for one that is not of the whole batch."""
    ends, keys = _ends(graph), dict[fx.Node, Key | None]()
    for node in (n for n in graph.nodes if n.op != "output"):
        kind, about = ends.get(node.name, ("", node.name))
        target, key = known.get(about, (node.target, None))
        if key is not None and kind:
            key = (kind, key[0]), key[1]
        elif key is None and node.op == "placeholder":
            key = ("total", node.name), 0
        elif target != node.target:
            key = None
        keys[node] = key
    return keys


def _ends(graph: fx.Graph) -> dict[str, tuple[str, str]]:
    """Return, by its name, what a node is that no whole batch has, of a tail's split or of keys that chunks keep, and
    the name of the node that it is about."""
    found = {value.name: ("joined", role.name) for value, role in outputs_of(graph) if role.kind == "joined"}
    for node in graph.nodes:
        if node.target is autopar.with_earlier.default:
            reader = next(iter(node.users))
            found[node.name] = f"keys {reader.args.index(node)}", reader.name
        elif node.target is autopar.of_own.default:
            producer, item = tensor_of(operand(node))
            found[node.name] = f"own {item}", producer.name
    for node in graph.find_nodes(op="placeholder"):
        if (of := known_by(node.meta["role"])) is not None:
            found[node.name] = of
        if node.meta["role"].kind == "cotangent":
            name = node.meta["role"].name
            found |= {node.name: ("cotangent", name), name: ("given", name)}
    return found


def _stands_for(compact: Compact, origin: Hashable, block: int) -> list[Key]:
    """Return all nodes that one of the small graph may stand for, wherever the graph is split."""
    return [(origin, number) for first in (0, compact.most) for number in compact.stands_for(block, first)]
