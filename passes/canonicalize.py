"""ATen -> `autopar::*`: every linear, attention, embedding and cross-entropy of an exported forward graph becomes one node.

Linears keep their 3-D form, so that the sequence dim stays a dim and can be sharded: `addmm` between two views (GPT-2's Conv1D)
becomes the same `autopar::linear` as `aten.linear`. Runs before differentiation, so autograd derives the backward.
"""

from __future__ import annotations

import torch
from torch import fx

from ..errors import UnsupportedOpError
from .canonicalize_attention import attention
from .canonicalize_batch_norm import batch_norm
from .canonicalize_loss import cross_entropy

aten, autopar = torch.ops.aten, torch.ops.autopar
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
# Checks of values and types; none of them makes a value.
ASSERTIONS = {
    aten._assert_tensor_metadata.default, aten._assert_scalar.default, aten._assert_async.msg, aten._assert_async.default,
    aten.sym_constrain_range.default, aten.sym_constrain_range_for_size.default,
}  # fmt: skip
RANDOM = ("bernoulli", "rand", "randn", "multinomial", "normal", "native_dropout", "uniform", "exponential", "poisson")


def canonicalize(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Rewrites in place and returns the module. Raises UnsupportedOpError listing every random op that is left."""
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in ASSERTIONS:
            graph.erase_node(node)
    for node in list(graph.nodes):
        rewrite = REWRITES.get(node.target) if node.op == "call_function" else None
        if rewrite is None:
            continue
        with graph.inserting_before(node), fx.traceback.preserve_node_meta(), fx.traceback.set_current_meta(node):
            replacement = rewrite(graph_module, node)
        if replacement is not None:
            replacement.meta.setdefault("val", node.meta.get("val"))
            node.replace_all_uses_with(replacement)
            graph.erase_node(node)
    graph.eliminate_dead_code()
    _refuse_randomness(graph)
    graph.lint()
    graph_module.recompile()
    return graph_module


def call(node: fx.Node, target, *args) -> fx.Node:
    """A new node in the place of `node` that remembers where it comes from."""
    new = node.graph.call_function(target, args)
    new.meta = {k: v for k, v in node.meta.items() if k != "val"}
    return new


def _linear(graph_module, node: fx.Node) -> fx.Node:
    x, weight, *bias = node.args
    y = call(node, autopar.linear.default, x, weight)
    return call(node, aten.add.Tensor, y, bias[0]) if bias and bias[0] is not None else y


def _conv1d(graph_module, node: fx.Node) -> fx.Node | None:
    """view to 2-D, addmm with an (i, o) weight, view back -> linear on the unflattened tensor. The last view disappears."""
    bias, flat, weight = node.args[:3]
    users = list(node.users)
    if node.kwargs or flat.op != "call_function" or flat.target not in VIEWS:
        return None
    if len(users) != 1 or users[0].target not in VIEWS or weight.op != "get_attr":
        return None
    x, back = flat.args[0], users[0]
    shape, after = x.meta["val"].shape, back.meta["val"].shape
    if flat.meta["val"].shape[-1] != shape[-1] or after[:-1] != shape[:-1] or after[-1] != node.meta["val"].shape[-1]:
        return None
    y = call(node, autopar.linear.default, x, call(node, aten.t.default, weight))
    y = call(node, aten.add.Tensor, y, bias)
    y.meta["val"] = back.meta["val"]
    back.replace_all_uses_with(y)
    node.graph.erase_node(back)
    return y


def _embedding(graph_module, node: fx.Node) -> fx.Node | None:
    weight, index, *rest = node.args
    padding_idx, scale_by_frequency, sparse = (*rest, *(-1, False, False)[len(rest) :])
    if scale_by_frequency or sparse:
        return None
    return call(node, autopar.embedding.default, weight, index, padding_idx, 0)


def _dropout(graph_module, node: fx.Node) -> fx.Node | None:
    x, p, train = node.args
    return x if p == 0 or not train else None


def _refuse_randomness(graph: fx.Graph) -> None:
    found = []
    for node in graph.nodes:
        name = str(node.target).removeprefix("aten.").split(".")[0].rstrip("_") if node.op == "call_function" else ""
        if name in ("dropout", "feature_dropout", "alpha_dropout") or name.removesuffix("_like") in RANDOM:
            found.append(f"{node.name} ({node.target})")
    if found:
        raise UnsupportedOpError(
            f"{len(found)} random ops would draw other numbers on every device: {', '.join(found[:8])}"
            + (" ..." if len(found) > 8 else ""),
            node=found[0],
            fix="set the dropout probabilities of the model's config to 0",
        )


REWRITES = {
    aten.batch_norm.default: batch_norm,
    aten.linear.default: _linear,
    aten.addmm.default: _conv1d,
    aten.embedding.default: _embedding,
    aten.dropout.default: _dropout,
    aten.dropout_.default: _dropout,
    aten.scaled_dot_product_attention.default: attention,
    aten.cross_entropy_loss.default: cross_entropy,
}
