"""Move to the blocks of a model what it computes of all of them after the last one, such as transformers' balance of
experts, which adds up the layers' shares of tokens when all layers are through:

    before   block 0, block 1, ..., f(block 0) -> sum 0, f(block 1) + sum 0 -> sum 1, ..., loss
    after    block 0, f(block 0) -> sum 0, block 1, f(block 1) + sum 0 -> sum 1, ..., loss

Each op goes to the end of the last block that it reads, and what reads none to the first block that reads it. So blocks
that add to a sum are alike, with their parts of it (autopar/frontend/shorten.py), and a stage of a pipeline adds its
own.
"""

from __future__ import annotations

import re

from torch import fx

from ..._torch import storage_key
from ..._torch.regions import written
from ...frontend.block_lists import FEWEST, GATHERS
from ...frontend.export import module_path
from ...ir.graph import is_op, values_of

NONE = -1  # the place of what reads no block
BLOCK = re.compile(r"(.*?)\.(\d+)(?:\.|$)")  # of the outermost list of a module's path


def by_block(graph_module: fx.GraphModule) -> None:
    """Move what follows the blocks of an exported forward to those that it reads, in place, and note in the module's
    meta whether there was any."""
    graph = graph_module.graph
    starts = _starts(graph)
    if not starts:
        return
    lists, nodes = set(starts.values()), list(graph.nodes)
    end = max(i for i, node in enumerate(nodes) if is_op(node) and _list_of(node) in lists)
    above = {name[: match.start()] for name in lists for match in re.finditer(r"^|\.", name)}
    place = _places(nodes, list(starts), end, above)
    last = len(starts) - 1
    moved = [node for node in nodes[end + 1 :] if NONE < place.get(node, last) < last]
    makers = {storage_key(value): node for node in reversed(nodes) for value in values_of(node)}
    after = set(nodes[end + 1 :])
    if moved and all(_may_be_passed(node, makers, place, after) for node in nodes):
        at = {node: i for i, node in enumerate(nodes)}
        ends = {p: nodes[at[start] - 1] for p, start in enumerate(list(starts)[1:])}
        for node in moved:
            ends[place[node]].append(node)
            ends[place[node]] = node
        graph_module.meta[GATHERS] = True


def _starts(graph: fx.Graph) -> dict[fx.Node, str]:
    """Return the first op of each block, in their order, and the list of modules that it is of; lists of few modules
    are none."""
    found: dict[fx.Node, str] = {}
    now, numbers = None, dict[str, set[str]]()
    for node in graph.nodes:
        match = BLOCK.match(module_path(node)) if is_op(node) else None
        if match is not None and match.groups() != now:
            now = match.groups()
            found[node] = match[1]
            numbers.setdefault(match[1], set()).add(match[2])
    return {node: name for node, name in found.items() if len(numbers[name]) >= FEWEST}


def _list_of(node: fx.Node) -> str | None:
    match = BLOCK.match(module_path(node))
    return match and match[1]


def _may_be_passed(node: fx.Node, makers: dict[int, fx.Node], place: dict[fx.Node, int], after: set[fx.Node]) -> bool:
    """Return whether ops of `after` may change places with an op although that may write to its arguments: to what its
    own block has made, or, in `after`, to what nothing else reads. `makers`: what first made a memory."""
    for value in written(node):
        maker = next((makers[storage_key(v)] for v in values_of(value)), value)  # a leaf, if its value is not known
        is_alone = maker is value and len(value.users) == 1
        if not (is_alone if node in after else is_op(maker) and place[maker] == place[node]):
            return False
    return True


def _places(nodes: list[fx.Node], starts: list[fx.Node], end: int, above: set[str]) -> dict[fx.Node, int]:
    """Return the block that each op belongs to, by its number in `starts`; after node number `end`, ops of the modules
    that hold the lists, whose paths are `above`, belong to the last one that they read."""
    place: dict[fx.Node, int] = {}
    now, last, number = NONE, len(starts) - 1, {node: i for i, node in enumerate(starts)}
    for i, node in enumerate(nodes):
        now = number.get(node, now)
        if node.op == "get_attr" and i > end:
            place[node] = NONE
        elif node.op == "call_function" and i <= end:
            place[node] = now
        elif node.op == "call_function":
            is_free = module_path(node) in above
            place[node] = max((place.get(a, NONE) for a in node.all_input_nodes), default=NONE) if is_free else last
    for node in reversed(nodes[end + 1 :]):
        if place.get(node) == NONE:
            place[node] = min((place[user] for user in node.users if user in place), default=last)
    return place
