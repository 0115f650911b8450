"""Stretches of the forward without gradients (`torch.no_grad`, `torch.set_grad_enabled`) in an exported graph.

The graph that torch exports has a node wherever the forward switches gradients on or off, and ops between them.
Differentiation runs these nodes, so that autograd sees what it sees in eager mode: writes to parameters are allowed
where gradients are off, and a value made there carries none. Rewrites of the graph look at values alone, through views,
copies and casts. So that none of them finds a way around such a stretch, values that leave it are detached where they
are made.
"""

from __future__ import annotations

import torch
from torch import fx

from ..._torch.regions import grad_switch, switch_grad, written
from ...ir.graph import is_tensor, output_node, tensor_of

aten = torch.ops.aten


def grad_regions(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Rewrite an exported forward in place and return its module: with as few switches as there can be, the last one
    on, and an `aten.detach` of every float value that is made without gradients and read with them."""
    graph = graph_module.graph
    has_gradients = _modes(graph)
    _switch(graph, has_gradients)
    for node in [n for n, on in has_gradients.items() if not on and _carries_gradients(n)]:
        readers = [user for user in node.users if has_gradients.get(user)]
        if readers and not _is_older(node, has_gradients):
            with graph.inserting_after(node):
                detached = graph.call_function(aten.detach.default, (node,))
            detached.meta = dict(node.meta)
            for reader in readers:
                reader.replace_input_with(node, detached)
    graph.lint()
    graph_module.recompile()
    return graph_module


def _modes(graph: fx.Graph) -> dict[fx.Node, bool]:
    """Return whether each op runs with gradients, and take the switches out."""
    modes: dict[fx.Node, bool] = {}
    now = True
    for node in list(graph.nodes):
        mode = grad_switch(node)
        if mode is not None:
            now = mode
            graph.erase_node(node)
        elif node.op == "call_function":
            modes[node] = modes.get(tensor_of(node)[0], now)
    return modes


def _switch(graph: fx.Graph, has_gradients: dict[fx.Node, bool]) -> None:
    """Put a switch before every op that runs otherwise than the one before it, and before the output."""
    now = True
    for node, on in [*has_gradients.items(), (output_node(graph), True)]:
        if on != now:
            with graph.inserting_before(node):
                switch_grad(graph, on)
        now = on


def _carries_gradients(node: fx.Node) -> bool:
    return is_tensor(node) and (node.meta["val"].is_floating_point() or node.meta["val"].is_complex())


def _is_older(node: fx.Node, has_gradients: dict[fx.Node, bool]) -> bool:
    """Return whether an op without gradients gives back a tensor that was made with them, as ops that write to their
    argument do, and a cast to the type that a tensor has."""
    while not has_gradients.get(node, True):
        same = _given_back(node)
        if same is None:
            return False
        node = same
    return True


def _given_back(node: fx.Node) -> fx.Node | None:
    """Return the argument that an op returns itself, not a copy or a view of it; None if there is none."""
    value = node.meta["val"]
    alike = [a for a in node.all_input_nodes if is_tensor(a) and _are_alike(a.meta["val"], value)]
    if not alike or not isinstance(node.target, torch._ops.OpOverload):
        return None
    if node.target._schema.is_mutable:
        return next(iter(written(node)), None) if node.target._schema.returns else None
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda a: a.meta["val"])
    result = node.target(*args, **kwargs)
    return next((a for a in alike if a.meta["val"] is result), None)


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
