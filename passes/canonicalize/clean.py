"""Takes out what changes nothing: aliases, copies, casts and views to the same shape and dtype, first powers, views of
views, duplicates.

Every node left is a node to plan, to price and to run. A value must stay in its phase, so equal nodes of the forward
and the backward are not merged. Copies into another order of memory stay, unless a view copies too: some kernels of
ATen read memory without looking at strides, and autograd's formulas copy for them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import cast

import torch
from torch import fx

from ...ir.casts import own_casts
from ...ir.graph import bytes_of, is_tensor, mark_phases, operand, output_node, renumbered, tensor_of
from ...ops import autopar
from .made_tensors import normalize_made_tensors
from .normalize_strides import normalize_strides
from .rewrite import CHECKS

aten = torch.ops.aten
_ALIASES = {aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default}
_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
_SAME_IF_EQUAL = _VIEWS | {
    aten.slice.Tensor, aten.expand.default, aten.clone.default, aten._to_copy.default, aten.permute.default,
}  # fmt: skip


def clean(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Clean a joint graph in place and return its module. Raises UnsupportedOpError (see normalize_strides)."""
    graph = graph_module.graph
    normalize_strides(graph)
    normalize_made_tensors(graph)
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.args or not is_tensor(node.args[0]):
            continue
        if node.target in CHECKS:
            graph.erase_node(node)
        elif node.target in _ALIASES or (node.target in _SAME_IF_EQUAL and _is_same(node)) or _is_first_power(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target in _VIEWS:
            source = operand(node)
            if (
                source.op == "call_function"
                and source.target in _VIEWS
                and _views_alike(node, source.args[0].meta["val"])
            ):
                node.args = (source.args[0], node.args[1])
            node.target = aten.reshape.default  # a shard's strides are not the whole tensor's
            node.args = (node.args[0], list(node.meta["val"].shape))
    _merge_equal(graph)
    graph.eliminate_dead_code()  # what nothing reads counts as backward, and would have views copied for it
    _repeat_in_backward(graph)
    graph.eliminate_dead_code()
    mark_phases(graph)
    graph.lint()
    graph_module.graph = renumbered(graph)
    return graph_module


FREE_VIEWS = _VIEWS | {
    aten.t.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.expand.default, aten.select.int, aten.slice.Tensor, aten.split.Tensor,
    aten.split_with_sizes.default,
}  # fmt: skip
REPEATED = FREE_VIEWS | {autopar.dequantize.default}


def _repeat_in_backward(graph: fx.Graph) -> None:
    """Give a backward op that reads a view of a forward value its own copy of the view, so that what is saved for the
    backward (or gathered again, for a parameter) is the viewed value itself; but not where views can be saved in its
    place. A quantized weight is dequantized again for the same reason: what stays is an eighth of the result."""
    mark_phases(graph)
    copies: dict[fx.Node, fx.Node] = {}
    readers = [n for n in graph.nodes if n.meta.get("phase") == "backward" and n is not output_node(graph)]
    saved = _saved_views(graph, readers)

    def in_backward(node: fx.Node) -> fx.Node:
        viewed, _ = tensor_of(node)
        is_forward = node.op == "call_function" and node.meta["phase"] == "forward"
        if not is_forward or viewed.target not in REPEATED or node in saved:
            return node
        if node not in copies:
            arguments = [in_backward(a) for a in node.all_input_nodes]
            renamed = dict(zip(node.all_input_nodes, arguments))
            copies[node] = graph.node_copy(node, lambda n: renamed[n])
            copies[node].meta = dict(node.meta)
        return copies[node]

    for user in readers:
        with graph.inserting_before(user):
            for argument in user.all_input_nodes:
                if (view := in_backward(argument)) is not argument:
                    user.replace_input_with(argument, view)


def _saved_views(graph: fx.Graph, readers: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the forward views that the backward reads instead of what they view, as it reads no more bytes of them
    than the op has made that they view. If they are moved on their way to ops of both phases, they are moved once."""
    casts, read = set(own_casts(graph).values()), defaultdict(set)
    for argument in {argument for reader in readers for argument in reader.all_input_nodes}:
        base = argument
        while (viewed := tensor_of(base)[0]).op == "call_function" and viewed.target in FREE_VIEWS:
            base = operand(viewed)
        if tensor_of(base)[0].op == "call_function" and tensor_of(base)[0].meta["phase"] == "forward":
            read[base].add(argument)
    return {
        view
        for base, views in read.items()
        if base not in casts and tensor_of(base)[0].target not in REPEATED and base not in views
        if sum(bytes_of(view.meta["val"]) for view in views) == bytes_of(base.meta["val"])
        for view in views
    }


def _is_same(node: fx.Node) -> bool:
    before, after = operand(node).meta["val"], node.meta["val"]
    if before.shape != after.shape or before.dtype != after.dtype or before.device != after.device:
        return False
    if node.target is aten.permute.default:
        return [d % before.dim() for d in cast(list[int], node.args[1])] == list(range(before.dim()))
    return before.stride() == after.stride() or all(_views_alike(user, before) for user in node.users)


def _views_alike(user: fx.Node, source: torch.Tensor) -> bool:
    """Return whether `user` is a view that has the same strides when it is made of `source`."""
    if user.target not in _VIEWS:
        return False
    like, value = torch.empty_strided(source.shape, source.stride(), device="meta"), user.meta["val"]
    return like.reshape(value.shape).stride() == value.stride()


def _is_first_power(node: fx.Node) -> bool:
    return node.target is aten.pow.Tensor_Scalar and bool(node.args[1] == 1) and _is_same(node)


def _merge_equal(graph: fx.Graph) -> None:
    seen: dict[tuple, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op not in ("call_function", "get_attr"):
            continue
        phase = (
            node.meta["phase"] if node.op == "call_function" else ""
        )  # a constant is no value to save for the backward
        key = (node.target, str(node.args), str(node.kwargs), phase)
        if key in seen:
            node.replace_all_uses_with(seen[key])
            graph.erase_node(node)
        else:
            seen[key] = node
