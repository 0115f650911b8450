"""Tensors that a model makes before it fills them: `x.new_zeros(n)` reads the type of `x` alone, so it becomes
`zeros(n)`, else a device would gather x for it.
"""

from __future__ import annotations

from torch import fx

from ..._torch import aten
from ...ir.graph import operand

MADE = {
    aten.new_zeros.default: aten.zeros.default, aten.new_ones.default: aten.ones.default,
    aten.new_full.default: aten.full.default, aten.new_empty.default: aten.empty.memory_format,
}  # fmt: skip


def normalize_made_tensors(graph: fx.Graph) -> None:
    """Rewrite made tensors in place."""
    for node in reversed(list(graph.nodes)):
        if node.target in MADE and operand(node).meta["val"].shape != node.meta["val"].shape:
            value = node.meta["val"]
            node.target, node.args = MADE[node.target], node.args[1:]
            node.kwargs = {"dtype": value.dtype, "device": value.device}
