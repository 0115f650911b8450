"""Split a local joint graph by data flow into a forward and a backward; what the backward needs is saved.

A forward value that is a view of a parameter, an input or another saved value is not saved but viewed again in the
backward. Two kinds of saved values are copied, so that saving them is right and costs what it says:

* a buffer, parameter or input that the forward's caller overwrites with its new value before the backward runs;
* slices of a tensor that nothing else saves and that are together less than it: they would keep all of it alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ..._torch import graph_module, storage_key
from ...cost.memory import NEARLY_ALL
from ...errors import VerifyError
from ...ir.graph import PARTNERS, bytes_of, describe, is_tensor, outputs_of, tensor_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Parts:
    """forward: (placeholders of the joint graph except tangents) -> (outputs and mutations, then the saved values).
    backward: (saved values, then tangents) -> gradients; None if the joint graph has no tangent and no gradient.
    saved: names of the saved values, in the order of both. The `output` nodes' meta["roles"] name the other values."""

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    saved: tuple[str, ...]


def partition(local: fx.GraphModule) -> Parts:
    """Split a local joint graph with meta["phase"] on its nodes and meta["roles"] on its output into forward and
    backward."""
    pairs = outputs_of(local.graph)
    forward_pairs = [(n, r) for n, r in pairs if r is None or r.is_forward]
    backward_pairs = [(n, r) for n, r in pairs if r is not None and not r.is_forward]
    placeholders = [n for n in local.graph.nodes if n.op == "placeholder"]
    tangents = [n for n in placeholders if n.meta["role"].is_tangent]
    _check_phases(local.graph, [n for n, _ in forward_pairs if isinstance(n, fx.Node)])

    saved = _saved(local.graph, [n for n, _ in backward_pairs if isinstance(n, fx.Node)])
    written = [r for _, r in forward_pairs if r is not None and "mutation" in r.kind]
    mutated = {(kind, role.name) for role in written for kind in PARTNERS[role.kind]}
    forward = extract(
        local,
        [n for n in placeholders if n not in tangents],
        [n for n, _ in forward_pairs] + saved,
        [r for _, r in forward_pairs] + [None] * len(saved),
        copied={n for n in saved if _is_overwritten(n, mutated)} | _slices(saved),
    )
    backward = None
    if backward_pairs:
        backward = extract(local, saved + tangents, [n for n, _ in backward_pairs], [r for _, r in backward_pairs])
    return Parts(forward, backward, tuple(n.name for n in saved))


def phase_of(node: fx.Node) -> str:
    """Return the phase that a node runs in; a getitem runs with the op whose output it names."""
    node, _ = tensor_of(node)
    if node.op in ("placeholder", "get_attr"):
        return "backward" if node.meta["role"].is_tangent else "forward"
    return node.meta["phase"]


def view_base(node: fx.Node) -> fx.Node | None:
    """Return the tensor whose memory the node's value shares, None if it has its own (or is the result of a
    collective)."""
    op, _ = tensor_of(node)
    if op.op != "call_function" or not is_tensor(node) or "_c10d_functional" in str(op.target):
        return None
    storage = _storage(node)
    return next((a for a in op.all_input_nodes if is_tensor(a) and _storage(a) == storage), None)


def _storage(node: fx.Node) -> int:
    return storage_key(node.meta["val"])


def _check_phases(graph: fx.Graph, outputs: Iterable[fx.Node]) -> None:
    for node in graph.nodes:
        if node.op == "call_function" and phase_of(node) == "forward":
            late = next((a for a in node.all_input_nodes if phase_of(a) == "backward"), None)
            if late is not None:
                raise VerifyError(
                    f"{node.name} runs in the forward and needs {late.name} of the backward",
                    node=describe(node),
                    source=node.meta.get("source"),
                )
    for node in outputs:
        if phase_of(node) == "backward":
            raise VerifyError(f"the forward output {node.name} is computed in the backward", node=describe(node))


def _saved(graph: fx.Graph, gradients: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the forward values that the backward takes, in graph order."""
    needed = {n for n in gradients if phase_of(n) == "forward"}
    for node in graph.nodes:
        if node.op == "call_function" and phase_of(node) == "backward":
            needed |= {a for a in node.all_input_nodes if phase_of(a) == "forward"}
    saved = set()
    for node in needed:
        base = view_base(node)
        while base is not None and base not in needed and base.op == "call_function":
            base = view_base(base)
        if base is None:
            saved.add(node)
        elif base not in needed:  # a placeholder or constant, of which the backward takes only views
            saved.add(base)
    return [n for n in graph.nodes if n in saved and n.op != "get_attr"]


def _is_overwritten(node: fx.Node, mutated: set[tuple[str, str]]) -> bool:
    role = node.meta.get("role")
    return node.op == "placeholder" and (role.kind, role.name) in mutated


def _slices(saved: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the saved views that together cover less of the memory that they keep alive than `NEARLY_ALL`."""
    groups: dict[int, list[fx.Node]] = {}
    for node in saved:
        if node.op == "call_function":
            groups.setdefault(_storage(node), []).append(node)
    return {
        node
        for views in groups.values()
        if sum(bytes_of(v.meta["val"]) for v in views) < NEARLY_ALL * views[0].meta["val"].untyped_storage().nbytes()
        for node in views
    }


def extract(local, inputs: Sequence[fx.Node], outputs: Sequence, roles: Sequence, copied=()) -> fx.GraphModule:
    """Return the graph that computes `outputs` from `inputs`, with exactly those inputs; it returns copies of the
    outputs in `copied`. `roles` go on its output node."""
    graph, new = fx.Graph(), {}
    for node in inputs:
        new[node] = graph.create_node("placeholder", node.name, (), {}, node.name)
        new[node].meta = {k: v for k, v in node.meta.items() if k not in ("collective", "sharding")}
    needed, stack = set(), [n for n in outputs if isinstance(n, fx.Node)]
    while stack:
        node = stack.pop()
        if node not in needed and node not in new:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    for node in local.graph.nodes:
        if node in needed:
            new[node] = graph.node_copy(node, new.__getitem__)
    results = {n: new[n] for n in outputs if isinstance(n, fx.Node)}
    *_, last = [None, *graph.nodes]
    for node in copied:
        with graph.inserting_after(last if node.op == "placeholder" else new[node]):  # early: a slice keeps all alive
            results[node] = graph.call_function(
                aten.clone.default, (new[node],), {"memory_format": torch.contiguous_format}
            )
        results[node].meta = {k: v for k, v in new[node].meta.items() if k not in ("role", "collective", "sharding")}
    output = graph.output(tuple(results.get(n) if isinstance(n, fx.Node) else n for n in outputs))
    output.meta["roles"] = list(roles)
    graph.lint()
    part = graph_module(local, graph, local.__class__.__name__)
    part.meta |= {k: local.meta[k] for k in ("rank", "mesh") if k in local.meta}
    return part
