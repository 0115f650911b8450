"""Gradient reductions put off: a backward that leaves gradients partial, and the reductions as a graph of their own.

Gradients of several micro-batches can be added before they are reduced, so that all of them together pay for one
reduction. Only the last step of a gradient is put off, from the layout that its op gives it to that of its parameter;
what a plan reduces earlier stays where it is. Rajbhandari et al., arXiv 1910.02054, section 5.2; Li et al., VLDB
13(12), 2020, section 3.2.4.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from ..._torch import graph_module
from ...ir.graph import OutputRole, Role, outputs_of, tensor_of, values_of
from ...ir.layout import Layout, is_partial_sum
from ...plans.sharding import Sharding


def unreduced_layouts(graph: fx.Graph, sharding: Sharding) -> dict[str, Layout]:
    """Return, by parameter, the layout in which its op gives a gradient, for all gradients that are partial sums
    there."""
    found = {}
    for value, role in outputs_of(graph):
        if role.kind == "gradient":
            layout = _layout_of(value, sharding)
            if layout is not None and is_partial_sum(layout, sharding.mesh):
                found[role.name] = layout
    return found


def _layout_of(value: fx.Node, sharding: Sharding) -> Layout | None:
    producer, item = tensor_of(value)
    if producer.name not in sharding.nodes:
        return None
    values = producer.meta["val"]
    position = 0 if isinstance(values, torch.Tensor) else sum(isinstance(v, torch.Tensor) for v in values[:item])
    return sharding.nodes[producer.name].outputs[position]


def without_reductions(graph: fx.Graph, sharding: Sharding) -> Sharding:
    """Return the decisions for a graph whose partial gradients leave it as they are."""
    layouts = unreduced_layouts(graph, sharding)
    pairs = zip(outputs_of(graph), sharding.outputs)
    outputs = [layouts.get(r.name, o) if r.kind == "gradient" else o for (_, r), o in pairs]
    return replace(sharding, outputs=tuple(outputs))


def reductions(graph: fx.Graph, sharding: Sharding) -> tuple[fx.GraphModule, Sharding]:
    """Return the joint graph that takes the partial gradients and gives them in their parameters' layouts, in the order
    of `unreduced_layouts`, and the decisions for it."""
    layouts = unreduced_layouts(graph, sharding)
    new = fx.Graph()
    nodes, targets = {}, {}
    for (value, role), target in zip(outputs_of(graph), sharding.outputs):
        if role.kind == "gradient" and role.name in layouts:
            node = nodes[role.name] = new.placeholder(f"g_{value.name}")
            node.meta = {
                "val": values_of(value)[0], "role": Role("gradient", role.name), "phase": "backward",
                "module": value.meta.get("module", ""), "source": value.meta.get("source", ""),
            }  # fmt: skip
            targets[role.name] = target
    result = new.output(tuple(nodes.values()))
    result.meta["roles"] = [OutputRole("gradient", name) for name in nodes]
    leaves = {node.name: layouts[name] for name, node in nodes.items()}
    owners = {n.meta["role"].name for n in graph.nodes if n.op == "placeholder" and n.name in sharding.on_host}
    decisions = replace(
        sharding,
        nodes={},
        leaves=leaves,
        outputs=tuple(targets.values()),
        kept=frozenset(),
        recomputed=frozenset(),
        on_host=frozenset(node.name for name, node in nodes.items() if name in owners),
    )
    return graph_module(torch.nn.Module(), new), decisions
