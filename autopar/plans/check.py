"""Check that the decisions of a plan that comes from a file can be right for a graph.

A plan's hash says that nobody changed it by accident, its fingerprint that it was made for this graph. Neither says
that what it decides gives right numbers: so every decision is derived again from the op's rule before it is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from .. import rules
from ..errors import PlanIncompatible
from ..ir.casts import CAST, own_casts
from ..ir.graph import PARTNERS, describe, is_op, outputs_of, tensor_arguments, tensor_of, values_of
from ..ir.layout import ROWS, Layout, is_even, is_legal
from ..ir.mesh import Mesh
from ..rules.lookup import has_rows
from ..rules.loss_regions import loss_regions
from ..rules.query_regions import query_regions
from ..rules.row_regions import row_regions
from ..rules.rule import Strategy
from .saved_on_host import SavedOnHost
from .sharding import NodeSharding, Sharding
from .tiled import TiledRegion

Offered = dict[tuple[int, tuple[str, ...], tuple[torch.Size, ...], tuple[torch.Size, ...]], Strategy | None]


def check_decisions(graph: fx.Graph, sharding: Sharding) -> None:
    """Raise PlanIncompatible naming the first node whose decision its rule does not offer, or that the graph does not
    have."""
    mesh = sharding.mesh
    nodes = {n.name: n for n in graph.nodes}
    ops = {n.name for n in graph.nodes if is_op(n)}
    early = {name for name in ops if nodes[name].meta["phase"] == "forward"}
    leaves = {n.name for n in graph.nodes if n.op in ("placeholder", "get_attr")}
    parameters = {n.name for n in graph.nodes if n.op == "placeholder" and n.meta["role"].kind == "parameter"}
    for names, known, what in (
        (sharding.nodes, ops, "op"),
        (sharding.leaves, leaves, "placeholder"),
        (sharding.recomputed, early, "op of the forward"),
        (sharding.on_host, parameters, "parameter"),
        ({name for one in sharding.loops for name in one.products}, ops, "op"),
        ({name for one in sharding.exchanges for name in (one.exchange, *one.products)}, ops, "op"),
        ({name for name, _, _ in sharding.kept}, ops | leaves, "tensor"),
    ):
        if unknown := sorted(set(names) - known):
            raise PlanIncompatible(f"the plan decides about {unknown[0]:.80}, an unknown {what}", fix="plan again")
    reduced_after = set(own_casts(graph).values())
    offered: Offered = {}
    for name, decision in sharding.nodes.items():
        if not _is_offered(nodes[name], decision, mesh, nodes[name] in reduced_after, offered):
            raise _wrong(nodes[name], f"the plan shards {name} in a way that its rule does not offer")
    _check_partial(graph, sharding)
    for name, layout in sharding.leaves.items():
        node = nodes[name]
        if not _fits(layout, node.meta["val"].shape, mesh) or _is_buffer(node) and not layout.is_replicated:
            raise _wrong(node, f"the plan gives {name} the layout {layout}, which it cannot have")
    for name, index, layout in sharding.kept:
        values = values_of(nodes[name])
        if (
            index >= len(values)
            or len(layout.dims) != values[index].dim()
            or not is_legal(values[index].shape, layout, mesh)
        ):
            raise _wrong(nodes[name], f"the plan keeps {name} as {layout}, which it cannot be")
    _check_outputs(graph, sharding)


def check_tiled(graph: fx.Graph, regions: Sequence[TiledRegion]) -> None:
    """Raise PlanIncompatible if one of these is no region of the graph: no last linear layer whose logits a loss alone
    reads, no row-wise ops, or no attention with a backward."""
    losses = {region.node.name for region in loss_regions(graph)} if any(r.is_loss for r in regions) else set()
    rows = {region.node.name for region in row_regions(graph)} if any(r.is_of_rows for r in regions) else set()
    queries = {region.node.name for region in query_regions(graph)} if any(r.kind for r in regions) else set()
    for region in regions:
        if region.node not in (losses if region.is_loss else queries if region.kind else rows):
            kind = "last layer of a loss" if region.is_loss else "attention" if region.kind else "end of row-wise ops"
            raise PlanIncompatible(
                f"the plan computes {region.node:.80} in pieces, which is no {kind}", fix="plan again"
            )


def check_saved_on_host(graph: fx.Graph, saved: SavedOnHost | None) -> None:
    """Raise PlanIncompatible if one of the values that wait on the host is none that an op of the forward makes."""
    early = {n.name: len(values_of(n)) for n in graph.nodes if is_op(n) and n.meta["phase"] == "forward"}
    for name, output in saved.values if saved else ():
        if output >= early.get(name, 0):
            raise PlanIncompatible(
                f"the plan keeps output {output} of {name:.80} on the host, which no op of the forward makes",
                fix="plan again",
            )


def _check_partial(graph: fx.Graph, sharding: Sharding) -> None:
    """Raise PlanIncompatible if an op is promised partial terms of a value that is not made as such: no collective
    splits a sum again."""
    for node in graph.nodes:
        decision = sharding.nodes.get(node.name) if is_op(node) else None
        for argument, wanted in zip(tensor_arguments(node), decision.inputs if decision else ()):
            producer, index = tensor_of(argument)
            made = sharding.nodes.get(producer.name)
            position = index and sum(isinstance(v, torch.Tensor) for v in producer.meta["val"][:index])
            partial = made.outputs[position].partial if made else ()
            if any(term not in partial and sharding.mesh.size(term[0]) > 1 for term in wanted.partial):
                raise _wrong(
                    node, f"the plan passes {argument.name} to {node.name} as {wanted}, which no collective makes of it"
                )


def _check_outputs(graph: fx.Graph, sharding: Sharding) -> None:
    """Raise PlanIncompatible unless every output has a layout that a DTensor can have, gradients and new values that of
    what they belong to."""
    outputs = outputs_of(graph)
    if len(sharding.outputs) != len(outputs):
        raise PlanIncompatible(
            f"the plan has {len(sharding.outputs)} outputs, the graph {len(outputs)}", fix="plan again"
        )
    leaves = {(n.meta["role"].kind, n.meta["role"].name): n for n in graph.nodes if n.op == "placeholder"}
    for (value, role), layout in zip(outputs, sharding.outputs):
        if layout is None or not _fits(layout, value.meta["val"].shape, sharding.mesh):
            raise _wrong(value, f"the plan returns {value.name} as {layout}, which it cannot be")
        if role.kind in PARTNERS and role.kind != "output":
            owner = next(leaves[kind, role.name] for kind in PARTNERS[role.kind] if (kind, role.name) in leaves)
            wanted = sharding.leaves.get(owner.name, Layout.replicated(owner.meta["val"].dim()))
            if layout != wanted:
                raise _wrong(value, f"the plan returns the {role.kind} of {role.name} as {layout}, not as {wanted}")


def _is_offered(node: fx.Node, decision: NodeSharding, mesh: Mesh, reduced_after: bool, offered: Offered) -> bool:
    """Return whether the op's rule offers a decision. `reduced_after`: it casts a gradient to its parameter's type, in
    which the gradient is reduced; `offered`: what rules offered to ops before, which repeated blocks ask for again."""
    inputs = tuple(a.meta["val"].shape for a in tensor_arguments(node))
    outputs = tuple(v.shape for v in values_of(node))
    if all(x.is_replicated for x in (*decision.inputs, *decision.outputs)):
        dims = [len(x.dims) for x in (*decision.inputs, *decision.outputs)]
        return (len(decision.inputs), dims) == (len(inputs), [len(shape) for shape in (*inputs, *outputs)])
    rule = rules.rule_of(node)
    # As what it casts, in any order of axes; the one term of a sum over an axis of one device is the sum.
    if node.target is CAST and len(inputs) == 1 and decision.inputs == decision.outputs:
        (layout,) = decision.inputs
        terms = {op for axis, op in layout.partial if mesh.size(axis) > 1} - ({ROWS} if has_rows(node) else set())
        is_linear = reduced_after or (rule is not None and frozenset({0}) in rule.linear)
        sums = not terms or (is_linear and terms == {"sum"})
        return sums and len(layout.dims) == len(inputs[0]) and is_legal(inputs[0], layout, mesh)
    if rule is None:
        return False
    key = id(rule), decision.choice, inputs, outputs
    if key not in offered:
        offered[key] = rules.strategy_of(rule, decision.choice, inputs, outputs, mesh)
    found = offered[key]
    return found is not None and (found.inputs, found.outputs) == (decision.inputs, decision.outputs)


def _fits(layout: Layout, shape: Sequence[int], mesh: Mesh) -> bool:
    """Return whether a tensor that enters or leaves the graph can have a layout: DTensors cut unevenly only in the
    mesh's order."""
    if layout.partial or len(layout.dims) != len(shape) or not is_legal(shape, layout, mesh):
        return False
    in_order = all(list(axes) == sorted(axes, key=mesh.names.index) for axes in layout.dims)
    return in_order or is_even(shape, layout, mesh)


def _is_buffer(node: fx.Node) -> bool:
    return node.op == "placeholder" and node.meta["role"].kind in ("buffer", "random")


def _wrong(node: fx.Node, message: str) -> PlanIncompatible:
    return PlanIncompatible(
        message, node=describe(node), source=node.meta.get("source") or None, fix="plan again with this model"
    )
