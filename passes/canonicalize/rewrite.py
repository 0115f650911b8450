"""ATen -> `autopar::*`: every linear, attention, embedding, cross-entropy and dropout of an exported forward becomes
one node.

Linears keep their 3-D form, so that the sequence dim stays a dim and can be sharded: `addmm` between two views (GPT-2's
Conv1D) becomes the same `autopar::linear` as `aten.linear`. Runs before differentiation, so autograd derives the
backward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from ...ir.graph import call, operand
from ...ops import autopar
from .attention import attention
from .batch_norm import batch_norm
from .by_block import by_block
from .experts import bmm, grouped_mm
from .filled_slices import join_filled_slices
from .loss import cross_entropy, nll_loss
from .random import has_formula, number_streams, random_op, refuse_the_rest
from .rows import index, squeeze
from .written_attention import written_attention

aten = torch.ops.aten
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
# Checks of values and types, none of which makes a value. For what they refuse (a class that one_hot does not have, a
# matrix that cannot be inverted) a compiled module computes on: a row of zeros, what LAPACK leaves behind.
CHECKS = {
    aten._assert_tensor_metadata.default, aten._assert_scalar.default, aten._assert_async.msg,
    aten._assert_async.default, aten.sym_constrain_range.default, aten.sym_constrain_range_for_size.default,
    aten._linalg_check_errors.default,
}  # fmt: skip


def canonicalize(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Rewrite an exported forward in place and return its module. Raises UnsupportedOpError listing the random ops that
    are left."""
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in CHECKS:
            graph.erase_node(node)
    join_filled_slices(graph)
    written_attention(graph_module)
    for node in list(graph.nodes):
        rewrite = random_op if has_formula(node) else _rewrite_of(node)
        if rewrite is None:
            continue
        with graph.inserting_before(node), fx.traceback.preserve_node_meta(), fx.traceback.set_current_meta(node):
            replacement = rewrite(graph_module, node)
        if replacement is not None:
            replacement.meta.setdefault("val", node.meta.get("val"))
            node.replace_all_uses_with(replacement)
            graph.erase_node(node)
    graph.eliminate_dead_code()
    refuse_the_rest(graph_module)
    by_block(graph_module)
    number_streams(graph)
    graph.lint()
    graph_module.recompile()
    return graph_module


def _rewrite_of(node: fx.Node) -> Callable | None:
    """Look up the rewrite of a node by its op, or by the op's name if it is of a library that may not be there."""
    if node.op != "call_function":
        return None
    return REWRITES.get(node.target) or REWRITES.get(str(node.target))


def _linear(graph_module, node: fx.Node) -> fx.Node:
    x, weight, *bias = node.args
    y = call(node, autopar.linear.default, x, weight)
    y.meta["val"] = node.meta["val"]
    return call(node, aten.add.Tensor, y, bias[0]) if bias and bias[0] is not None else y


def _conv1d(graph_module, node: fx.Node) -> fx.Node | None:
    """Turn a view to 2-D, addmm with an (i, o) weight and the view back into linear on the unflattened tensor. The last
    view disappears."""
    bias, flat, weight = (operand(node, i) for i in range(3))
    users = list(node.users)
    if node.kwargs or flat.op != "call_function" or flat.target not in VIEWS:
        return None
    if len(users) != 1 or users[0].target not in VIEWS or not _is_leaf(weight):
        return None
    x, back = operand(flat), users[0]
    shape, after = x.meta["val"].shape, back.meta["val"].shape
    if flat.meta["val"].shape[-1] != shape[-1] or after[:-1] != shape[:-1] or after[-1] != node.meta["val"].shape[-1]:
        return None
    y = call(node, autopar.linear.default, x, _transposed(node, weight))
    y.meta["val"] = back.meta["val"]
    y = call(node, aten.add.Tensor, y, bias)
    y.meta["val"] = back.meta["val"]
    back.replace_all_uses_with(y)
    node.graph.erase_node(back)
    return y


def _transposed(node: fx.Node, matrix: fx.Node) -> fx.Node:
    turned = call(node, aten.t.default, matrix)
    turned.meta["val"] = matrix.meta["val"].t()
    return turned


def _is_leaf(node: fx.Node) -> bool:
    """Return whether the node is a parameter or buffer, or the cast of one."""
    return node.op == "get_attr" or (node.target is aten.to.dtype and operand(node).op == "get_attr")


def _matmul(graph_module, node: fx.Node) -> fx.Node | None:
    a, b = (operand(node, i).meta["val"].shape for i in range(2))
    return call(node, autopar.matmul.default, *node.args) if len(a) > 2 and a[:-2] == b[:-2] else None


def _embedding(graph_module, node: fx.Node) -> fx.Node | None:
    weight, index, *rest = node.args
    padding_idx, scale_by_frequency, sparse = (*rest, *(-1, False, False)[len(rest) :])
    if scale_by_frequency or sparse:
        return None
    return call(node, autopar.embedding.default, weight, index, padding_idx, 0)


REWRITES = {
    aten.batch_norm.default: batch_norm,
    aten.linear.default: _linear,
    aten.addmm.default: _conv1d,
    aten.embedding.default: _embedding,
    aten.bmm.default: bmm,
    aten.index.Tensor: index,
    aten.squeeze.default: squeeze,
    aten.matmul.default: _matmul,
    aten._grouped_mm.default: grouped_mm,
    "transformers.grouped_mm_fallback.default": grouped_mm,
    aten.scaled_dot_product_attention.default: attention,
    aten.cross_entropy_loss.default: cross_entropy,
    aten.nll_loss_nd.default: nll_loss,
    aten.nll_loss.default: nll_loss,
    aten.nll_loss2d.default: nll_loss,
}
