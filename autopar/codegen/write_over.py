"""Ops that write where one of their arguments was, once nothing else reads that: no memory is asked for.

Much of what a step allocates are such results, and the pages of each have to come from the system, or at least through
the caches. Only a value that an op has made in memory of its own may be written over, by the last op that reads it.
What is saved, given, lent or sent, and what views lie in, has readers that are none of these ops.

The order of the nodes counts from here on, since an op does not show what it writes over.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from ..ops import autopar

aten = torch.ops.aten
IN_PLACE: dict[object, object] = {  # each writes over its first argument
    aten.add.Tensor: aten.add_.Tensor,
    aten.div.Scalar: aten.div_.Scalar,
    aten.div.Tensor: aten.div_.Tensor,
    aten.index_add.default: aten.index_add_.default,
    aten.index_copy.default: aten.index_copy_.default,
    aten.mul.Scalar: aten.mul_.Scalar,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.neg.default: aten.neg_.default,
    aten.pow.Tensor_Scalar: aten.pow_.Scalar,
    aten.rsqrt.default: aten.rsqrt_.default,
    aten.sub.Tensor: aten.sub_.Tensor,
}
COMMUTE = {aten.add.Tensor, aten.mul.Tensor}
WRITES_OUT = {aten.silu_backward.default: (aten.silu_backward.grad_input, "grad_input")}  # over its first argument too
MAKES_ANEW = {  # ops whose result is in memory of its own, and that keep nothing of what they read
    *IN_PLACE, *IN_PLACE.values(), *WRITES_OUT, *(op for op, _ in WRITES_OUT.values()),
    aten._to_copy.default, aten.bmm.default, aten.cat.default, aten.clone.default, aten.embedding.default,
    aten.gelu.default, aten.gelu_backward.default, aten.index_select.default, aten.linear.default,
    aten.matmul.default, aten.mm.default, aten.new_zeros.default, aten.relu.default, aten.sigmoid.default,
    aten.silu.default, aten.slice_backward.default, aten.sum.dim_IntList, aten.tanh.default,
    autopar.grouped_mm.default, autopar.grouped_mm_dw.default, autopar.sum_rows.default,
}  # fmt: skip


def write_over(module: fx.GraphModule) -> None:
    """Let ops of a graph write over an argument where they may, in place."""
    order = {node: i for i, node in enumerate(module.graph.nodes)}

    def may_write(node: fx.Node, at: int) -> bool:
        over = node.args[at]
        if not isinstance(over, fx.Node) or over.target not in MAKES_ANEW or sum(a is over for a in node.args) > 1:
            return False
        if any(user.target not in MAKES_ANEW or order[user] > order[node] for user in over.users):
            return False
        before, after = over.meta.get("val"), node.meta.get("val")
        return isinstance(before, Tensor) and isinstance(after, Tensor) and _form(before) == _form(after)

    for node in module.graph.nodes:
        if node.target in COMMUTE and not node.kwargs and not may_write(node, 0) and may_write(node, 1):
            node.args = (node.args[1], node.args[0])
        if node.target in IN_PLACE and may_write(node, 0):
            node.target = IN_PLACE[node.target]
        elif node.target in WRITES_OUT and may_write(node, 0):
            node.target, name = WRITES_OUT[node.target]
            node.kwargs = {**node.kwargs, name: node.args[0]}


def _form(value: Tensor) -> tuple[object, ...]:
    return value.shape, value.dtype, value.device, value.stride()
