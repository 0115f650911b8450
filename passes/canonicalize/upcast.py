"""Gradients of mixed precision are upcast where they are made, so that whatever adds them up adds wide values.

Differentiation casts a gradient back to its parameter's type at the very end, behind the sums over uses of the
parameter and the views on the way. All of these are linear: the cast moves in front of them. What is left directly in
front of it is the op whose result is partial when the batch is sharded.
"""

from __future__ import annotations

import torch
from torch import fx

from ...ir.graph import is_tensor, operand, outputs_of

aten = torch.ops.aten
CAST = aten._to_copy.default
LINEAR = {
    aten.add.Tensor, aten.sub.Tensor, aten.neg.default, aten.cat.default, aten.reshape.default, aten.view.default,
    aten._unsafe_view.default, aten.t.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten.squeeze.dims,
}  # fmt: skip


def upcast(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Upcast the gradients of a joint graph in place and return its module."""
    graph = graph_module.graph
    waiting = [n for n, role in outputs_of(graph) if role.kind == "gradient" and is_widening(n)]
    while waiting:
        cast = waiting.pop()
        source, dtype = operand(cast), cast.meta["val"].dtype
        if source.op != "call_function" or source.target not in LINEAR or len(source.users) > 1:
            continue
        with graph.inserting_before(source):
            for argument in dict.fromkeys(
                a for a in source.all_input_nodes if is_tensor(a) and a.meta["val"].dtype != dtype
            ):
                wide = graph.call_function(CAST, (argument,), {"dtype": dtype})
                wide.meta = {**cast.meta, "val": argument.meta["val"].to(dtype)}
                source.replace_input_with(argument, wide)
                waiting.append(wide)
        source.meta["val"] = source.meta["val"].to(dtype)
        cast.replace_all_uses_with(source)
        graph.erase_node(cast)
    graph.lint()
    graph_module.recompile()
    return graph_module


def is_widening(node: fx.Node) -> bool:
    """Return whether the node casts to a wider type and does nothing else."""
    if node.op != "call_function" or node.target is not CAST:
        return False
    before, after = operand(node).meta["val"].dtype, node.meta["val"].dtype
    return before.is_floating_point and after.itemsize > before.itemsize
