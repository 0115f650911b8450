"""Write the joint graph of one part of a batch, which is cut over an axis in time (passes/pipeline/batch_axis.py)."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable

import torch
from torch import fx

from ..._torch import graph_module
from ...cost.redistribute import Link
from ...errors import MicroBatchError
from ...ir.graph import Role, describe, leaf_name, output_node, tensor_arguments
from ...ir.layout import Layout
from ...ops.streams import STREAM, stream_of
from ...plans.sharding import NodeSharding, Sharding
from ..distribute.localize import localize
from .batch_axis import AXIS, FIX, OFFSET, BatchAxis, partial_of

aten = torch.ops.aten


def one_part(
    joint: fx.GraphModule,
    axis: BatchAxis,
    micro_batches: int,
    count: int,
    checks: bool = True,
    settle: Callable[[fx.GraphModule], None] = lambda local: None,
) -> fx.GraphModule:
    """Return the joint graph of one of the micro-batches that span `count` positions along the axis. `checks`: whether
    all are alike has to be seen, once what may tell them apart is made to `settle`. Raises MicroBatchError if they are
    not."""
    joint, nodes, leaves = _rewritten(joint, axis, micro_batches)
    sharding = Sharding(axis.mesh, {AXIS: Link(0.0, 1.0)}, 1.0, nodes, leaves, axis.outputs)
    far = axis.mesh.devices - count  # where the last one begins
    local = localize(joint, sharding, 0, coordinate={AXIS: range(count)})
    settle(local)
    if checks:
        last = localize(joint, sharding, 0, coordinate={AXIS: range(far, far + count)})
        settle(last)
        _draw_by_position(local, last, far)
        _check_alike(local, last)
    _forget_axis(local)
    return local


def _rewritten(
    joint: fx.GraphModule, axis: BatchAxis, micro_batches: int
) -> tuple[fx.GraphModule, dict[str, NodeSharding], dict[str, Layout]]:
    """Return a copy of the joint graph that takes the totals as inputs and divides what is added in shares, with the
    layouts of its ops and leaves."""
    graph, nodes, leaves = fx.Graph(), dict(axis.nodes), dict(axis.leaves)
    new: dict[fx.Node, fx.Node] = {}
    totals: dict[fx.Node, fx.Node] = {}
    for node in joint.graph.nodes:
        if node.op == "placeholder":
            new[node] = graph.node_copy(node)
    for i, node in enumerate(axis.totals):
        role = Role("total", str(i))
        totals[node] = graph.placeholder(leaf_name(role))
        totals[node].meta = {**node.meta, "role": role, "phase": "forward"}
        leaves[totals[node].name] = Layout.replicated(node.meta["val"].dim())
    for node in joint.graph.nodes:
        if node not in new:
            decision = nodes.get(node.name)
            read = zip(tensor_arguments(node), decision.inputs) if decision is not None and totals else ()
            whole = {a: totals[a] for a, layout in read if a in totals and not layout.partial}
            shares: dict[fx.Node, fx.Node] = {}
            for value in axis.shares.get(node, ()):
                shares[value] = share = graph.call_function(aten.mul.Tensor, (new[value], 1 / micro_batches))
                share.meta = {**value.meta, "phase": node.meta.get("phase", "backward")}
                nodes[share.name] = NodeSharding((Layout.replicated(value.meta["val"].dim()),), (partial_of(value),))
            new[node] = graph.node_copy(node, ChainMap(shares, whole, new).__getitem__)
            if node.target in OFFSET and axis.shares.get(node) == frozenset():
                new[node].update_arg(1, node.args[1] / micro_batches)
    graph.eliminate_dead_code()
    return graph_module(joint, graph, "MicroBatch"), nodes, leaves


def _draw_by_position(first: fx.GraphModule, last: fx.GraphModule, far: int) -> None:
    """Give random ops the step from one position along the axis to the next, in the graphs of the first position and
    of the one `far` from it; they read the position of a micro-batch from the random state."""
    for a, b in zip(first.graph.nodes, last.graph.nodes, strict=True):
        if a.op == "placeholder" and a.meta["role"].kind == "random":
            a.meta["val"] = a.meta["val"].new_empty(3)
        elif stream_of(a) is not None:
            start = STREAM[a.target] + 1
            step = (b.args[start] - a.args[start]) // far
            b.update_arg(start, a.args[start])
            for node in (a, b):
                node.args = (*node.args[: start + 2], step, *node.args[start + 3 :])


def _forget_axis(local: fx.GraphModule) -> None:
    """Make the local graph a joint graph like others."""
    output_node(local.graph).meta.pop("layouts", None)
    for node in local.graph.nodes:
        for key in ("global", "layout", "sharding"):
            node.meta.pop(key, None)
    local.meta.clear()


def _check_alike(first: fx.GraphModule, last: fx.GraphModule) -> None:
    """Raise MicroBatchError if micro-batches need graphs of their own: for an op whose constants say where its samples
    stand."""
    for a, b in zip(first.graph.nodes, last.graph.nodes, strict=False):
        if a.op != "output" and _said(a) != _said(b):
            raise MicroBatchError(
                f"{a.name} needs to know which samples of the batch it has: {a.target}",
                node=describe(a),
                source=a.meta.get("source") or None,
                fix=FIX,
            )


def _said(node: fx.Node) -> tuple:
    return node.name, node.target, str(node.args), str(node.kwargs)
