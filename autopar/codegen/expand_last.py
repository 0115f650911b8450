"""Values that are expanded are computed with before that, not after: a mean's gradient is divided once a row, and not
once an element, which would be memory as large as what the mean was of."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import Tensor, fx

from ..ir.graph import operand
from .write_over import IN_PLACE, aten

BY_A_NUMBER = {aten.div.Scalar, aten.mul.Scalar, aten.div.Tensor, aten.mul.Tensor}


def expand_last(module: fx.GraphModule) -> None:
    """Swap an expand and a product or quotient with a number, where pointwise ops read that, in place."""
    for node in module.graph.nodes:
        wide = node.args[0] if node.target in BY_A_NUMBER else None
        if not isinstance(wide, fx.Node) or wide.target is not aten.expand.default:
            continue
        is_number = all(isinstance(a, int | float) for a in node.args[1:]) and not node.kwargs
        if not is_number or not _same_type(wide, node) or any(user.target not in IN_PLACE for user in node.users):
            continue
        narrow = operand(wide)
        with module.graph.inserting_before(node):
            made = module.graph.call_function(cast(Callable, node.target), (narrow, *node.args[1:]))
            expanded = module.graph.call_function(aten.expand.default, (made, *wide.args[1:]))
        made.meta = {**node.meta, "val": narrow.meta["val"]}
        expanded.meta = {**node.meta, "val": wide.meta["val"]}
        node.replace_all_uses_with(expanded)
        module.graph.erase_node(node)
        if not wide.users:
            module.graph.erase_node(wide)


def _same_type(*nodes: fx.Node) -> bool:
    values = [node.meta.get("val") for node in nodes]
    types = {value.dtype for value in values if isinstance(value, Tensor)}
    return len(types) == 1 and all(isinstance(value, Tensor) for value in values)
