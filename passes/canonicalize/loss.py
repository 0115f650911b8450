"""cross_entropy_loss and nll_loss -> the shardable forms of autopar/ops/cross_entropy.py, on logits and targets before
being flattened.

Models flatten (b, s, v) logits to (b * s, v) and widen them to fp32 before the loss. Both steps are undone here: the
merged dim could not be sharded by sequence, and the op computes in fp32 anyway, so the narrow logits are what the
backward keeps. Classes in the second dim, (n, c, d1, ...), are turned to the last.
"""

from __future__ import annotations

import torch
from torch import fx

from ..._torch import schema_names
from ...ir.graph import call, operand
from ...ops.cross_entropy import cross_entropy as cross_entropy_formula
from ...ops.cross_entropy import negative_log_likelihood

aten = torch.ops.aten
_FLATTENING = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_SAME_VALUE = (aten.contiguous.default, aten.clone.default, aten.alias.default, aten.to.dtype, aten.to.dtype_layout)


def cross_entropy(graph_module: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """Return the scalar (or per-target) loss node in the place of cross_entropy_loss, None where the formula does not
    apply: probabilities as targets, class weights that have a gradient."""
    given = _arguments(node)
    smoothing = given.get("label_smoothing", 0.0)
    classes = _classes(given["self"])
    return _loss(node, given, cross_entropy_formula, smoothing=smoothing, classes=classes)


def nll_loss(graph_module: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """Return the same in the place of nll_loss, nll_loss2d and nll_loss_nd."""
    return _loss(node, _arguments(node), negative_log_likelihood)


def _arguments(node: fx.Node) -> dict:
    return dict(zip(schema_names(node.target), node.args)) | dict(node.kwargs)


def _classes(scores: fx.Node) -> int:
    shape = scores.meta["val"].shape
    return shape[1] if len(shape) > 1 else shape[0]


def _loss(node: fx.Node, given: dict, formula, **options) -> fx.Node | None:
    scores, target, weight = given["self"], given["target"], given.get("weight")
    if target.meta["val"].dtype not in (torch.int64, torch.int32) or (
        weight is not None and weight.meta["val"].requires_grad
    ):
        return None
    reduction = given.get("reduction", 1)
    scores, target = _classes_last(node, scores, target, bool(reduction))
    tracer = fx.proxy.GraphAppendingTracer(node.graph)
    scores, target, weight = (None if x is None else fx.Proxy(x, tracer) for x in (scores, target, weight))
    dtype = node.meta["val"].dtype
    return formula(scores, target, given.get("ignore_index", -100), reduction, dtype, weight, **options).node


def _classes_last(node: fx.Node, scores: fx.Node, target: fx.Node, is_reduced: bool) -> tuple[fx.Node, fx.Node]:
    """Return scores with their classes in the last dim, and targets of the same other dims; before they were flattened,
    where the loss is one number."""
    ndim = scores.meta["val"].dim()
    if ndim <= 2:
        wide_scores, wide_target = _peel(scores, keep_last=True), _peel(target, keep_last=False)
        is_same = wide_target.meta["val"].shape == wide_scores.meta["val"].shape[:-1]
        return (wide_scores, wide_target) if is_reduced and is_same else (scores, target)
    scores = _peel(scores, keep_last=True, flattened=False)
    if ndim == 3 and scores.target is aten.transpose.int and {d % 3 for d in scores.args[1:]} == {1, 2}:
        return _peel(operand(scores), keep_last=True, flattened=False), target  # it was turned for the loss
    value = scores.meta["val"]
    order = [0, *range(2, ndim), 1]
    scores = call(node, aten.permute.default, scores, order)
    scores.meta["val"] = value.permute(order)
    return scores, target


def _peel(node: fx.Node, keep_last: bool, flattened: bool = True) -> fx.Node:
    """Return the tensor before copies, casts to a wider dtype and, if `flattened`, views that merge leading dims."""
    while node.op == "call_function":
        source = operand(node)
        if node.target in _FLATTENING and flattened:
            if keep_last and source.meta["val"].shape[-1:] != node.meta["val"].shape[-1:]:
                return node
        elif node.target not in _SAME_VALUE or _narrows(source.meta["val"].dtype, node.meta["val"].dtype):
            return node
        node = source
    return node


def _narrows(before: torch.dtype, after: torch.dtype) -> bool:
    return before != after and (not before.is_floating_point or after.itemsize < before.itemsize)
