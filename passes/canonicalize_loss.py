"""cross_entropy_loss -> the shardable form of autopar/ops.py, on logits and targets as they were before being flattened.

Models flatten (b, s, v) logits to (b * s, v) and widen them to fp32 before the loss. Both steps are undone here: the merged dim
could not be sharded by sequence, and the op computes in fp32 anyway, so the narrow logits are what the backward keeps.
"""

from __future__ import annotations

import torch
from torch import fx

from .._torch import schema_names
from ..ops import cross_entropy as cross_entropy_formula

aten = torch.ops.aten
_FLATTENING = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_SAME_VALUE = (aten.contiguous.default, aten.clone.default, aten.alias.default, aten.to.dtype, aten.to.dtype_layout)


def cross_entropy(graph_module: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """The scalar (or per-target) loss node in the place of cross_entropy_loss, None where the formula does not apply: class
    weights, label smoothing, probabilities as targets, classes in another dim than the last."""
    schema = schema_names(node.target)
    given = dict(zip(schema, node.args)) | dict(node.kwargs)
    logits, target = given["self"], given["target"]
    if given.get("weight") is not None or given.get("label_smoothing", 0.0) or logits.meta["val"].dim() != 2:
        return None
    if target.meta["val"].dtype not in (torch.int64, torch.int32):
        return None
    reduction = given.get("reduction", 1)
    if reduction:
        wide_logits, wide_target = _peel(logits, keep_last=True), _peel(target, keep_last=False)
        if wide_target.meta["val"].shape == wide_logits.meta["val"].shape[:-1]:
            logits, target = wide_logits, wide_target
    tracer = fx.proxy.GraphAppendingTracer(node.graph)
    dtype = node.meta["val"].dtype
    loss = cross_entropy_formula(
        fx.Proxy(logits, tracer), fx.Proxy(target, tracer), given.get("ignore_index", -100), reduction, dtype
    )
    return loss.node


def _peel(node: fx.Node, keep_last: bool) -> fx.Node:
    """The tensor before views that merge leading dims, copies and casts to a wider dtype."""
    while node.op == "call_function":
        source = node.args[0]
        if node.target in _FLATTENING:
            if keep_last and source.meta["val"].shape[-1] != node.meta["val"].shape[-1]:
                return node
        elif node.target not in _SAME_VALUE or _narrows(source.meta["val"].dtype, node.meta["val"].dtype):
            return node
        node = source
    return node


def _narrows(before: torch.dtype, after: torch.dtype) -> bool:
    return before != after and (not before.is_floating_point or after.itemsize < before.itemsize)
