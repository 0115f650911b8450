"""Casts of mixed precision that are part of a vertex: nothing is decided between a tensor and its cast.

A parameter is gathered in the type that it computes in, so its cast comes first; a gradient is reduced in its
parameter's type, so its cast comes first as well. Both hold for every plan if the vertex hands on the cast value in the
layout it decides on.
"""

from __future__ import annotations

import torch
from torch import fx

from .graph import outputs_of, tensor_of

aten = torch.ops.aten
CAST = aten._to_copy.default
# Partial values pass only through these: more pass-through ops never improved a plan and grow the problem.
PASS_PARTIAL = {
    aten.add.Tensor, aten.sub.Tensor, aten.reshape.default, aten.transpose.int, aten.permute.default, aten.t.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten._to_copy.default, aten.cat.default,
    aten.neg.default,
}  # fmt: skip


def own_casts(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Map what is cast to its cast: parameters that nothing else reads, and values that end as gradients through ops
    of PASS_PARTIAL alone. Of casts in a row, as autograd rounds the gradient of a norm's weight before it is widened,
    it is the last one: the sum over devices is then of what was there before the rounding."""
    result: dict[fx.Node, fx.Node] = {}
    gradients = {n for n, role in outputs_of(graph) if role.kind == "gradient"}
    for node in graph.nodes:
        if node.op != "call_function" or node.target is not CAST or len(node.args[0].users) > 1:
            continue
        source = node.args[0]
        is_parameter = source.op == "placeholder" and source.meta["role"].kind == "parameter"
        is_made_here = source.op == "call_function" and node.meta["phase"] == "backward"
        is_last = not any(user.target is CAST for user in node.users)
        if is_parameter or (is_made_here and is_last and _leads_to(node, gradients)):
            result[source] = node
    return result


def _leads_to(node: fx.Node, gradients: set[fx.Node]) -> bool:
    """Return whether a value ends as a gradient through ops that are each read by one alone."""
    while node not in gradients:
        users = list(node.users)
        if len(users) != 1 or users[0].target not in PASS_PARTIAL:
            return False
        (node,) = users
    return True


def output_of(node: fx.Node) -> int:
    """Return which tensor output of its producer a node is; items that are None (a gradient nobody wants) are no
    outputs."""
    producer, item = tensor_of(node)
    return item if item == 0 else sum(isinstance(v, torch.Tensor) for v in producer.meta["val"][:item])
