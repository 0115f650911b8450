"""A last linear layer and its loss in blocks of logits: linear + vocab_loss -> linear_loss, forward and backward.

Logits and their gradient are never whole. A device that has a part of the vocabulary finds the maximum and the sum of
its own part; behind the maximum over all parts, which is there already, the sum is scaled to it:

    top, total, picked = linear_loss(x, weight, target)        in the place of linear, amax and vocab_loss
    sum                = total * exp(top - row_max)            row_max: the maximum of all tops
    dx, dw             = linear_loss_bw(...)                   in the place of vocab_loss_bw, linear_dx and linear_dw

An output that is the logits is left without values (autopar/runtime/unmade.py makes it when it is read).
"""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch import fx

from ...errors import VerifyError
from ...ir.graph import describe, operand
from ...ops import autopar
from ...rules.loss_regions import LossRegion, region_of
from .emit import Builder
from .replace import move_before, origin, replace

aten = torch.ops.aten


def tile_loss(graph: fx.Graph, layers: Collection[str]) -> None:
    """Rewrite a local joint graph in place; `layers`: names of the linear layers whose logits are not to be made. What
    was there is left without readers. Raises VerifyError if something else reads the logits."""
    for node in [n for n in graph.nodes if n.name in layers]:
        region = region_of(node)
        if region is None:
            raise VerifyError(f"something else than its loss reads {node.name}", node=describe(node))
        _tile(graph, region)


def _tile(graph: fx.Graph, region: LossRegion) -> None:
    builder = Builder(graph, region.linear.meta["val"].fake_mode)
    x, weight = operand(region.linear), operand(region.linear, 1)
    target, row_max, offset = operand(region.sums, 1), operand(region.sums, 2), region.sums.args[3]
    move_before(region.top, target)
    with graph.inserting_before(region.top):
        builder.meta = origin(region.linear)
        made = builder.call(autopar.linear_loss.default, x, weight, target, offset)
        top, total, picked = (builder.call(operator.getitem, made, i) for i in range(3))
    replace(region.top, top)
    with graph.inserting_before(region.sums):
        builder.meta = origin(region.sums)
        if not _is_own(row_max, top):
            scale = builder.call(aten.exp.default, builder.call(aten.sub.Tensor, top, row_max))
            total = builder.call(aten.mul.Tensor, total, scale)
    for item in list(region.sums.users):
        replace(item, picked if item.args[1] else total)
    _tile_backward(graph, builder, region)
    for view in region.logits:
        for user in [u for u in view.users if u.op == "output"]:
            with graph.inserting_before(region.linear):
                builder.meta = origin(region.linear)
                user.replace_input_with(view, _without_values(builder, x, view))


def _tile_backward(graph: fx.Graph, builder: Builder, region: LossRegion) -> None:
    """Put one op in the place of the gradient of the logits and the two products with it."""
    grad_sum, grad_picked, _, target, row_max, offset = region.back.args
    x, weight = operand(region.dw, 1), operand(region.dx, 1)
    order = {node: i for i, node in enumerate(graph.nodes)}
    late = min(region.dx, region.dw, key=order.__getitem__)
    for argument in (x, weight):
        move_before(late, argument)
    with graph.inserting_before(late):
        builder.meta = origin(region.back)
        arguments = grad_sum, grad_picked, x, weight, target, row_max, offset
        made = builder.call(autopar.linear_loss_bw.default, *arguments)
        for i, node in enumerate((region.dx, region.dw)):
            builder.meta = origin(node) | {k: node.meta[k] for k in ("global", "layout") if k in node.meta}
            replace(node, builder.call(operator.getitem, made, i))


def _without_values(builder: Builder, x: fx.Node, logits: fx.Node) -> fx.Node:
    """Return what has the form of the logits, no memory, and NaN for whoever reads it all the same."""
    number = builder.call(aten.new_full.default, x, [1] * logits.meta["val"].dim(), float("nan"))
    return builder.call(aten.expand.default, number, list(logits.meta["val"].shape))


def _is_own(row_max: fx.Node, top: fx.Node) -> bool:
    """Return whether a maximum is that of the columns that are here, in any type."""
    while row_max.target is aten._to_copy.default:
        row_max = operand(row_max)
    return row_max is top
