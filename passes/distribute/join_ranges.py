"""Join the calls of an attention that one device has for two ranges of its queries, so that one op takes them all.

    a0 = attention(q[0:n], ..., first=f)    a1 = attention(q[n:m], ..., first=g)    out = cat(a0[0], a1[0])
    a  = attention(q, ..., first=f)         out = a[0]                              ranges = (n, 0, m - n, g - f)

The inverse of zigzag_attention.py. The op that is left stands for its ranges, and does not compute by itself.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from ...ir.graph import operand, tensor_of
from ...ops import ATTENTION
from ...rules.reading import bound
from .emit import Builder
from .replace import origin, replace

aten = torch.ops.aten
Ranges = dict[fx.Node, tuple[int, ...]]  # of an attention, how many queries each of its ranges has, and its place


def join_ranges(graph: fx.Graph, names: Collection[str]) -> Ranges:
    """Rewrite a local joint graph in place; `names`: of attentions of the forward, whose backwards follow. Return the
    ranges of those that had several, which are known by `part_of`."""
    found: Ranges = {}
    for calls in _calls(graph):
        name, lse = str(calls[0].meta.get("part_of")), bound(calls[0]).get("lse")
        is_behind = lse is not None and operand(_whole(lse, name)) in found
        if len(calls) > 1 and (name in names or is_behind):
            one, ranges = _join(graph, name, calls)
            found[one] = ranges
    if found:
        graph.eliminate_dead_code()
    return found


def _calls(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return the calls of each attention, in the graph's order."""
    calls: dict[object, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target in ATTENTION:
            calls.setdefault(node.meta.get("part_of", node), []).append(node)
    return list(calls.values())


def _join(graph: fx.Graph, name: str, calls: Sequence[fx.Node]) -> tuple[fx.Node, tuple[int, ...]]:
    """Put one op in the place of several, and return it with their ranges."""
    firsts = [bound(call)["first"] for call in calls]
    queries = [bound(call)["q"].meta["val"].shape[2] for call in calls]
    own = {key: _whole(value, name) for key, value in bound(calls[0]).items()}
    builder = Builder(graph, operand(calls[0]).meta["val"].fake_mode)
    builder.meta = origin(calls[0]) | {"part_of": name}
    items = sorted((tensor_of(item)[1], item) for item in calls[0].users)
    results = [(index, _last(item, name)) for index, item in items]
    with graph.inserting_before(calls[0]):
        made = builder.call(calls[0].target, *own.values(), name=name)
        for index, old in results:
            replace(old, builder.call(operator.getitem, made, index))
    return made, tuple(number for many, first in zip(queries, firsts) for number in (many, first - firsts[0]))


def _whole(value: Any, attention: str) -> Any:
    """Return the tensor of which a call has some rows."""
    is_part = isinstance(value, fx.Node) and value.target is aten.slice.Tensor
    return operand(value) if is_part and value.meta.get("part_of") == attention else value


def _last(node: fx.Node, attention: str) -> fx.Node:
    """Return what is made of a call's result that others read."""
    while all(user.meta.get("part_of") == attention for user in node.users):
        (node,) = node.users
    return node
