"""Takes strides out of a joint graph: a device's part of a tensor has other strides than the whole.

`as_strided` and its scatter become reshapes where they only name the elements of a contiguous tensor in order, as the
backward of a mean over an image does; `new_empty_strided` becomes `new_empty`; and `cat` loses the empty lists of one
dim that it ignores.
"""

from __future__ import annotations

import math

from torch import fx

from ..._torch import aten
from ...errors import UnsupportedOpError
from ...ir.graph import describe


def normalize_strides(graph: fx.Graph) -> None:
    """Take strides out of the graph in place. Raises UnsupportedOpError listing every op that reads a tensor by strides
    in another order."""
    left = []
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten.new_empty_strided.default:
            node.target, node.args = aten.new_empty.default, node.args[:2]
        elif node.target is aten.cat.default:
            _drop_empties(node)
        elif node.target is aten.as_strided.default:
            base, size, stride, *offset = node.args
            left += [] if _in_order(base, size, stride, offset) and _reshape(node, base, size) else [node]
        elif node.target is aten.as_strided_scatter.default:
            base, source, size, stride, *offset = node.args
            shape = list(base.meta["val"].shape)
            left += [] if _in_order(base, size, stride, offset) and _reshape(node, source, shape) else [node]
    if left:
        raise UnsupportedOpError(
            f"{len(left)} ops read a tensor by strides, which its parts do not have: "
            f"{', '.join(n.name for n in left[:8])}",
            node=describe(left[0]),
            source=left[0].meta.get("source") or None,
            fix="use view, permute or unfold",
        )


def _in_order(base: fx.Node, size: list[int], stride: list[int], offset: list) -> bool:
    """Return whether a strided view has the elements of a contiguous tensor in their order."""
    value = base.meta["val"]
    expected, step = True, 1
    for length, jump in zip(reversed(size), reversed(stride)):
        expected &= length == 1 or jump == step
        step *= length
    return expected and value.is_contiguous() and math.prod(size) == value.numel() and not any(offset)


def _reshape(node: fx.Node, source: fx.Node, shape: list[int]) -> bool:
    node.target, node.args, node.kwargs = aten.reshape.default, (source, list(shape)), {}
    return True


def _drop_empties(node: fx.Node) -> None:
    tensors, *dim = node.args
    full = [t for t in tensors if t.meta["val"].dim() == node.meta["val"].dim()]
    if len(full) < len(tensors):
        node.args = (full, *dim)
