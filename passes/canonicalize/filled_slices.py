"""Empty tensors that a model fills slice by slice, as code does that saves a copy of what it joins (the keys of
multi-head latent attention): they become the `cat` of what is copied into the slices, and nothing is written to.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import fx

from ..._torch import aten
from ...ir.graph import call, operand

EMPTY = (aten.empty.memory_format, aten.new_empty.default)


class Fill(NamedTuple):
    """A copy into a slice of a made tensor, from `start` to `stop` of a dim; `order`: its place in the graph."""

    order: int
    dim: int
    start: int
    stop: int
    source: fx.Node
    copy: fx.Node


def join_filled_slices(graph: fx.Graph) -> None:
    """Rewrite an exported forward in place."""
    made = [n for n in graph.nodes if n.op == "call_function" and n.target in EMPTY]
    if not made:
        return
    order = {node: i for i, node in enumerate(graph.nodes)}
    writes = [i for node, i in order.items() if _writes(node)]
    for base in made:
        fills = _first_fills(base, order)
        if fills is None:
            continue
        own, last = {fill.order for fill in fills}, fills[-1]
        if any(fills[0].order < i < last.order and i not in own for i in writes):  # perhaps to what was copied
            continue
        pieces = sorted(fills, key=lambda fill: fill.start)
        with graph.inserting_before(last.copy):
            joined = call(last.copy, aten.cat.default, [_value(fill) for fill in pieces], last.dim)
        joined.meta["val"] = base.meta["val"]
        for fill in fills:
            _erase(fill.copy, base)
        base.replace_all_uses_with(joined)
        graph.erase_node(base)


def _first_fills(base: fx.Node, order: dict[fx.Node, int]) -> list[Fill] | None:
    """Return the first copies into a tensor if they fill all of it, each place once, before anything else is done to
    it."""
    fills: list[Fill] = []
    for user in sorted(base.users, key=order.__getitem__):
        fill = _fill_of(user, order)
        if fill is None or fills and fill.dim != fills[0].dim:
            return None
        fills.append(fill)
        pieces = sorted((f.start, f.stop) for f in fills)
        ends = [0, *(stop for _, stop in pieces)]
        if any(start < end for (start, _), end in zip(pieces, ends)):
            return None
        if ends[:-1] == [start for start, _ in pieces] and ends[-1] == base.meta["val"].shape[fill.dim]:
            later = [u for u in base.users if order[u] > order[user] and order[u] < fill.order]
            return None if later else sorted(fills)
    return None


def _fill_of(view: fx.Node, order: dict[fx.Node, int]) -> Fill | None:
    """Return the copy that a slice of a made tensor is made for, None if it is for anything else."""
    while view.target is aten.slice.Tensor and len(view.users) == 1:
        (user,) = view.users
        if view.meta["val"].shape != operand(view).meta["val"].shape or user.target is aten.copy_.default:
            break
        view = user  # a slice of all of it
    if view.target is not aten.slice.Tensor or len(view.users) != 1:
        return None
    (copy,) = view.users
    if copy.target is not aten.copy_.default or copy.args[0] is not view or copy.users:
        return None
    given: tuple[Any, ...] = (*view.args[1:], None, None, None)
    dim, shape = given[0] or 0, operand(view).meta["val"].shape
    start, stop, step = slice(*given[1:4]).indices(shape[dim])
    return Fill(order[copy], dim % len(shape), start, stop, operand(copy, 1), copy) if step == 1 else None


def _value(fill: Fill) -> fx.Node:
    """Return what fills a slice, in the type and shape of the slice."""
    made, source = operand(fill.copy).meta["val"], fill.source
    if source.meta["val"].dtype != made.dtype:
        source, value = call(fill.copy, aten._to_copy.default, source, dtype=made.dtype), source.meta["val"]
        source.meta["val"] = value.to(made.dtype)
    if source.meta["val"].shape != made.shape:
        source, value = call(fill.copy, aten.expand.default, source, list(made.shape)), source.meta["val"]
        source.meta["val"] = value.expand(made.shape)
    return source


def _writes(node: fx.Node) -> bool:
    """Return whether an op writes to one of its arguments."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _erase(node: fx.Node, base: fx.Node) -> None:
    """Erase a copy and the slices of `base` that it was made through."""
    while node is not base:
        before = operand(node)
        node.graph.erase_node(node)
        node = before
