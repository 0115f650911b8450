"""Find the rule of a node, and which tensors are rows that were dispatched to experts: each needs the other."""

from __future__ import annotations

import torch
from torch import fx

from ..ir.graph import is_op, tensor_arguments, tensor_of
from ..ops import autopar
from .expert_rows import DISPATCHES, WAYS, by_owner
from .families import Builder
from .normalize import normalize
from .reading import is_zero
from .rule import Rows, Rule

TABLE: dict[str, Builder] = {}
KNOWN: dict[tuple[object, ...], Rule | None] = {}  # repeated blocks ask for the same rules again and again


def rule_of(node: fx.Node) -> Rule | None:
    """Return the sharding rule of a graph node, from the global shapes in its metadata; None if the op has none."""
    if node.op != "call_function":
        return None
    key = (node.target, tuple(map(_seen, node.args)), tuple((k, _seen(v)) for k, v in node.kwargs.items()))
    if key not in KNOWN:
        builder = TABLE.get(str(node.target))
        made = builder(node) if builder else None
        made = normalize(node, made) if made else None
        KNOWN[key] = by_owner(node, made, [has_rows(a) for a in tensor_arguments(node)]) if made else None
    return KNOWN[key]


def has_rows(node: fx.Node) -> bool:
    """Return whether dim 0 of a node's tensor is rows that were dispatched."""
    node, _ = tensor_of(node)
    if "rows" not in node.meta:
        if not is_op(node) or not node.graph.find_nodes(op="call_function", target=autopar.dispatch.default):
            return False
        _mark(node.graph)
    return bool(node.meta["rows"])


def forget_rows(graph: fx.Graph) -> None:
    """Forget which tensors of a graph are rows that were dispatched, as others were dispatched since."""
    for node in graph.nodes:
        node.meta.pop("rows", None)


def _mark(graph: fx.Graph) -> None:
    """Say of every op of a graph whether dim 0 of what it makes is rows."""
    for node in graph.nodes:
        if "rows" in node.meta:
            continue
        node.meta["rows"] = node.target in DISPATCHES
        if not is_op(node) or node.target in WAYS:
            continue
        if any(has_rows(a) for a in tensor_arguments(node)) and (rule := rule_of(node)) is not None:
            node.meta["rows"] = any(
                isinstance(dims[0], tuple) and any(isinstance(e, Rows) and e.by_owner for e in dims[0])
                for dims in rule.outputs
                if dims
            )


def _seen(argument: object) -> object:
    """Return all that a rule may depend on: shape, dtype and zeroness of tensors, other arguments as they print."""
    if isinstance(argument, (tuple, list)):
        return tuple(map(_seen, argument))
    if not isinstance(argument, fx.Node):
        return repr(argument)
    value = argument.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return "other"
    return tuple(value.shape), value.dtype, is_zero(argument), has_rows(argument)
