"""All-reduces of values that nothing else reads happen in the memory of the value: a copy less in time and in space.

The functional collectives copy their input first, since they cannot know who else reads it; the graph knows. Runs last,
on one rank's graph in ATen ops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import cast

from torch import fx

from ..._torch import c10d, storage_key
from ...ir.graph import values_of
from ...ops import autopar


def in_place(local: fx.GraphModule) -> fx.GraphModule:
    """Turn all-reduces of spare values into in-place ones, in the graph itself, and return the same module."""
    holders = Counter(storage_key(value) for node in local.graph.nodes for value in values_of(node))
    for node in local.graph.nodes:
        if node.target is c10d.all_reduce.default and _is_spare(node.args[0], holders):
            node.target = c10d.all_reduce_.default
    local.recompile()
    return local


def _is_spare(node: fx.Node, holders: Counter) -> bool:
    """Return whether the memory of a node's value ends with its one reader, and no other node's value lies in it."""
    values = values_of(node)
    return (
        node.op == "call_function"
        and len(node.users) == 1
        and len(values) == 1
        and values[0].is_contiguous()
        and holders[storage_key(values[0])] == 1 + _is_of_rounds(node)
    )


def _is_of_rounds(node: fx.Node) -> bool:
    """Return whether a node says that further rounds were added to another node's value, which nothing else reads."""
    if node.target is not autopar.written.default:
        return False
    value, made = cast(tuple[fx.Node, Sequence[fx.Node]], node.args)
    return value.users.keys() == {node, *made} and all(one.target is autopar.in_rounds.default for one in made)
