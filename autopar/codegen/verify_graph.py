"""Checks that run after every pass in tests and under AUTOPAR_CHECK=1: what they catch is a wrong number or a hang.

check_global    the joint graph is well formed and annotated (see autopar/ir/graph.py)
check_sharding  no decision loses a Partial: into an op that is not linear, out of the graph, or out of nowhere
check_local     one rank's graph: every local shape is the one that its layout implies, every argument has the
                layout that its op was promised, no output is Partial
check_values    every op can be computed from its arguments, and its value is what the node says
check_ranks     all ranks issue the same collectives in the same order in every group
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import fx

from .._torch import c10d, fake_mode, tree_flatten
from ..errors import VerifyError, said
from ..ir.graph import OutputRole, describe, is_op, output_node, tensor_arguments, values_of
from ..ir.layout import Layout, local_shape
from ..ir.mesh import Mesh
from ..ops import autopar
from ..passes.distribute.local_values import local_value
from ..passes.distribute.partition import phase_of
from ..plans.sharding import Sharding
from ..rules import rule_of
from .python_code import is_collective

ROLES = (
    "parameter", "buffer", "input", "tangent", "cotangent", "constant", "random", "total", "activation", "arriving",
    "copy", "kept", "kept_sum",
)  # fmt: skip
OUTPUT_ROLES = (
    "output", "joined", "gradient", "input_gradient", "mutation", "input_mutation", "activation", "returned"
)  # fmt: skip

OWN_ROWS = autopar.exchange_rows.default, autopar.exchange_reached.default, autopar.in_rounds.default


def check_global(joint: fx.GraphModule) -> None:
    """Raise VerifyError if the joint graph breaks a promise of autopar/ir/graph.py."""
    joint.graph.lint()
    for node in joint.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            role = node.meta.get("role")
            if role is None or role.kind not in ROLES:
                raise _error("has no role", node)
        elif is_op(node):
            if node.meta.get("phase") not in ("forward", "backward"):
                raise _error("has no phase", node)
            if node.meta["phase"] == "forward":
                late = next((a for a in node.all_input_nodes if phase_of(a) == "backward"), None)
                if late is not None:
                    raise _error(f"runs in the forward and needs {late.name} of the backward", node)
        elif node.op not in ("call_function", "output"):
            raise _error(f"is a {node.op}, which a joint graph does not have", node)
        if node.op != "output" and "val" not in node.meta:
            raise _error("has no value", node)
    output = output_node(joint.graph)
    roles = output.meta.get("roles")
    if roles is None or len(roles) != len(output.args[0]):
        raise _error(f"has {len(output.args[0])} values and {len(roles or ())} roles", output)
    if any(role is not None and role.kind not in OUTPUT_ROLES for role in roles):
        raise _error("has a role that is none of " + ", ".join(OUTPUT_ROLES), output)


def check_sharding(joint: fx.GraphModule, sharding: Sharding) -> None:
    """Raise VerifyError if a decision could give a wrong number."""
    mesh = sharding.mesh
    for node in joint.graph.nodes:
        decision = sharding.nodes.get(node.name) if is_op(node) else None
        if decision is None:
            continue
        inputs = [_without_single(l, mesh) for l in decision.inputs]
        outputs = [_without_single(l, mesh) for l in decision.outputs]
        for axis in mesh.names:
            _check_axis(node, axis, inputs, outputs)
    output = output_node(joint.graph)
    for value, role, layout in zip(output.args[0], output.meta["roles"], sharding.outputs):
        if layout is not None and not _stays_inside(role) and _without_single(layout, mesh).partial:
            raise _error(f"leaves the graph as {layout}: outputs must not be partial", value)


def _check_axis(node, axis: str, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> None:
    partial = {i for i, l in enumerate(inputs) if l.reduction_of(axis)}
    sharded = any(l.dim_of(axis) is not None for l in inputs)
    made = [l for l in outputs if l.reduction_of(axis)]
    if partial and sharded:
        raise _error(f"takes some arguments partial and some sharded over {axis}", node)
    if partial and (len(made) < len(outputs) or any(inputs[i].reduction_of(axis) != "sum" for i in partial)):
        raise _error(f"takes a partial argument over {axis} and its output does not say so", node)
    if made and not partial and not sharded:
        raise _error(f"claims a partial output over {axis} and no argument is split over it", node)
    if sharded and not made and outputs and all(l.dim_of(axis) is None for l in outputs):
        raise _error(f"has an argument sharded over {axis} and an output that forgets it", node)
    rule = rule_of(node) if partial else None
    if partial and (rule is None or partial not in rule.linear):
        arguments = ", ".join(map(str, sorted(partial)))
        raise _error(f"takes argument {arguments} partial over {axis} and is not linear in it", node)


def check_local(local: fx.GraphModule, mesh: Mesh, computes: bool = False) -> None:
    """Raise VerifyError if a local graph's values are not what their layouts say, or with `computes` not what their ops
    make. The rank is local.meta["rank"]."""
    if computes:
        check_values(local.graph)
    local.graph.lint()
    coordinate = mesh.coordinate(local.meta["rank"])
    for node in local.graph.nodes:
        if node.op == "output":
            _check_outputs(node, mesh)
            continue
        layouts, whole = node.meta.get("layout"), node.meta.get("global")
        if layouts is not None and whole is not None:
            layouts = (layouts,) if isinstance(layouts, Layout) else layouts
            values = [whole] if isinstance(whole, torch.Tensor) else [v for v in whole if isinstance(v, torch.Tensor)]
            for mine, value, layout in zip(values_of(node), values, layouts, strict=True):
                implied = local_shape(value.shape, layout, mesh, coordinate)
                if tuple(mine.shape) != implied:
                    raise _error(f"has local shape {tuple(mine.shape)}, its layout {layout} implies {implied}", node)
        for argument, promised in zip(tensor_arguments(node), getattr(node.meta.get("sharding"), "inputs", ())):
            got = argument.meta.get("layout")
            if got is None:
                raise _error(f"was promised {argument.name} as {promised}, and that has no layout", node)
            if _without_single(got, mesh) != _without_single(promised, mesh):
                raise _error(f"was promised {argument.name} as {promised} and gets it as {got}", node)


def check_values(graph: fx.Graph, renew: bool = False) -> None:
    """Compute the form of every op's value from those of its arguments, and keep it where a node has none, or with
    `renew` everywhere. Raise VerifyError at the first op that cannot be computed, or whose node says something else,
    and of a graph without an output."""
    graph.lint()
    if not graph.find_nodes(op="output"):
        raise VerifyError("it has no output")
    mode = fake_mode()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
        try:
            value = local_value(node.target, args, kwargs, mode)
        except Exception as error:
            raise _error(f"cannot be computed: {said(error)}", node) from error
        if renew or "val" not in node.meta:
            node.meta["val"] = value
        elif _forms(value) != _forms(node.meta["val"]):
            raise _error(f"says that it is {_shown(node.meta['val'])}, and is {_shown(value)}", node)


def _forms(value: object) -> list[tuple]:
    """Return shape and dtype of each tensor of a value."""
    return [(tuple(v.shape), v.dtype) for v in tree_flatten(value)[0] if isinstance(v, torch.Tensor)]


def _shown(value: object) -> str:
    return ", ".join(f"{shape} {str(dtype).removeprefix('torch.')}" for shape, dtype in _forms(value)) or "no tensor"


def _check_outputs(output: fx.Node, mesh: Mesh) -> None:
    """Raise VerifyError if a value that leaves the step is partial."""
    for value, role in zip(output.args[0], output.meta["roles"]):
        layout = value.meta.get("layout") if isinstance(value, fx.Node) and not _stays_inside(role) else None
        if layout is not None and _without_single(layout, mesh).partial:
            raise _error(f"leaves the graph as {layout}: outputs must not be partial", value)


def _stays_inside(role: OutputRole | None) -> bool:
    """Return whether an output goes to another graph of the step: saved values, which have no role, and what stages
    hand on."""
    return role is None or role.kind in ("activation", "returned")


def check_ranks(graphs: Sequence[fx.GraphModule]) -> None:
    """Raise VerifyError at the first collective on which two ranks of a group disagree. graphs[r] is rank r's."""
    mesh = graphs[0].meta["mesh"]
    calls = [collectives(graph) for graph in graphs]
    groups = {(c[0], mesh.group(tuple(c[0].split(",")), rank)) for rank, mine in enumerate(calls) for c in mine}
    for axes, ranks in sorted(groups):
        first, *others = ([(c, n) for c, n in zip(calls[r], _starts(graphs[r])) if c[0] == axes] for r in ranks)
        for rank, other in zip(ranks[1:], others):
            for position, ((a, node), (b, _)) in enumerate(zip(first, other)):
                if a != b:
                    here, there = f"{a[1:]} on rank {ranks[0]}", f"{b[1:]} on rank {rank}"
                    raise _error(f"is collective {position} over {axes}: {here} and {there}", node)
            if len(first) != len(other):
                raise VerifyError(
                    f"rank {ranks[0]} has {len(first)} collectives over {axes}, rank {rank} has {len(other)}", mesh=mesh
                )


def collectives(local: fx.GraphModule) -> list[tuple]:
    """List a graph's collectives in order, which is the same in all ranks of a group."""
    return [collective_call(node) for node in _starts(local)]


def collective_call(node: fx.Node) -> tuple[str, str, str, str, tuple[int, ...]]:
    """Return what the ranks of a group must agree on: (group, op, reduction or "", dtype, local shape)."""
    value = tensor_arguments(node)[0].meta["val"]
    reduction = next((a for a in node.args[1:-1] if isinstance(a, str)), "")
    dtype = str(value.dtype).removeprefix("torch.")
    op = node.target.overloadpacket.__name__.rstrip("_")  # in place or not is each rank's own business
    rows = 1 if sends_own_rows(node) else 0  # their number is each rank's own business
    return node.args[-1], op, reduction, dtype, tuple(value.shape[rows:])


def sends_own_rows(node: fx.Node) -> bool:
    """Return whether a collective is an all-to-all in which ranks may send different numbers of rows."""
    if node.target is c10d.all_to_all_single.default:
        received, sent = cast(Sequence[Sequence[int]], node.args[1:3])
        counts = {*received, *sent}
        return len(counts) > 1 or 0 in counts
    return node.target in OWN_ROWS


def _starts(local: fx.GraphModule) -> Iterable[fx.Node]:
    return [node for node in local.graph.nodes if is_collective(node)]


def _without_single(layout: Layout, mesh: Mesh) -> Layout:
    """Return the layout without axes of one device, over which every layout is the same."""
    if all(size > 1 for size in mesh.sizes):
        return layout
    dims = tuple(tuple(a for a in axes if mesh.size(a) > 1) for axes in layout.dims)
    parts = tuple(p if axes else 1 for p, axes in zip(layout.parts, dims))
    return replace(layout, dims=dims, partial=tuple(p for p in layout.partial if mesh.size(p[0]) > 1), parts=parts)


def _error(message: str, node: fx.Node) -> VerifyError:
    return VerifyError(f"{node.name} {message}", node=describe(node), source=node.meta.get("source") or None)
