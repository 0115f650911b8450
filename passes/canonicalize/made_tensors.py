"""Tensors that a model makes before it fills them: what they read of others, and slices that fill them.

`x.new_zeros(n)` reads the type of `x` alone, so it becomes `zeros(n)`: else a device would gather x for it. A chain of
slice_scatter that fills all of an empty tensor, as code does that saves a copy of what it joins (the keys of multi-head
latent attention), becomes the `cat` of the slices.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from ..._torch import aten
from ...ir.graph import call, operand

MADE = {
    aten.new_zeros.default: aten.zeros.default, aten.new_ones.default: aten.ones.default,
    aten.new_full.default: aten.full.default, aten.new_empty.default: aten.empty.memory_format,
}  # fmt: skip
EMPTY = (aten.empty.memory_format, aten.new_empty.default)


def normalize_made_tensors(graph: fx.Graph) -> None:
    """Rewrite made tensors in place."""
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function":
            continue
        if node.target is aten.slice_scatter.default:
            _join(node)
        elif node.target in MADE and operand(node).meta["val"].shape != node.meta["val"].shape:
            value = node.meta["val"]
            node.target, node.args = MADE[node.target], node.args[1:]
            node.kwargs = {"dtype": value.dtype, "device": value.device}


def _join(last: fx.Node) -> None:
    """Make a concatenation of a slice_scatter if it and those that it continues fill an empty tensor."""
    dim, base, pieces = _range(last)[0], last, []
    while base.op == "call_function" and base.target is aten.slice_scatter.default:
        own, start, stop, step = _range(base)
        if own != dim or step != 1:
            return
        pieces.append((start, stop, operand(base, 1)))
        base = operand(base)
    pieces.sort(key=lambda piece: piece[0])
    ends = [0, *(stop for _, stop, _ in pieces)]
    is_filled = ends[:-1] == [start for start, _, _ in pieces] and ends[-1] == last.meta["val"].shape[dim]
    if base.op != "call_function" or base.target not in EMPTY or not is_filled:
        return
    with last.graph.inserting_before(last):
        joined = call(last, aten.cat.default, [_value(last, piece) for _, _, piece in pieces], dim)
    joined.meta["val"] = last.meta["val"]
    last.replace_all_uses_with(joined)
    last.graph.erase_node(last)


def _range(node: fx.Node) -> tuple[int, int, int, int]:
    """Return the dim that a slice_scatter fills, from where to where and in which steps."""
    given: tuple[Any, ...] = node.args[2:]
    dim, limits = given[0] if given else 0, (*given[1:], None, None, None)[:3]
    shape = operand(node).meta["val"].shape
    return dim % len(shape), *slice(*limits).indices(shape[dim])


def _value(last: fx.Node, piece: fx.Node) -> fx.Node:
    """Return what fills a slice. A copy into a view of what was there is the value that was copied, in the type and
    shape of the view."""
    if piece.op != "call_function" or piece.target is not aten.copy.default:
        return piece
    made, source = piece.meta["val"], operand(piece, 1)
    if source.meta["val"].dtype != made.dtype:
        source, value = call(last, aten._to_copy.default, source, dtype=made.dtype), source.meta["val"]
        source.meta["val"] = value.to(made.dtype)
    if source.meta["val"].shape != made.shape:
        source, value = call(last, aten.expand.default, source, list(made.shape)), source.meta["val"]
        source.meta["val"] = value.expand(made.shape)
    return source
