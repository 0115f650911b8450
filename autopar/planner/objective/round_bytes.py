"""Bytes that a further round of experts' rows holds while it runs (passes/distribute/add_rounds.py), where devices have
a capacity.

A round is one program for all that ends it in a phase: the rows that go back, and sums over rows. It runs once what
the forward does between the rows' way there and back, or in the backward that again and the gradients of it, for as
many rows as the capacity lets a device have at once, and adds each sum up beside the one that is there. A tensor lives
to its last reader. Rows are copied where they are sent, and on GPUs where a product sorts them. It runs behind the last
op of the first round, when what that reads is gone in the backward, and may be saved in the forward.
"""

from __future__ import annotations

import math

from torch import fx

from ...cost.exchange import BACK, WAYS
from ...cost.expert_load import GROUPED
from ...ir.graph import is_op, tensor_arguments, tensor_of, values_of
from ...ops import autopar
from ...rules import Strategy
from ...rules.lookup import has_rows
from ..problem.problem import Problem
from ..problem.vertices import Vertex

SAVED_OF_ROW = 24  # bytes
ENDS = (*BACK, autopar.grouped_mm_dw.default)


def round_bytes(problem: Problem, vertex: Vertex, strategy: Strategy) -> float:
    """Return the bytes of a round on a device beside those of the op behind which it runs, under a strategy of that; 0
    of other ops."""
    capacity, node = problem.expert_capacity, vertex.node
    if capacity is None or node.target not in ENDS or not strategy.inputs[0].owned_axes:
        return 0.0
    mesh, rows = problem.mesh, strategy.inputs[0]
    devices, owners = (math.prod(map(mesh.size, axes)) for axes in (rows.dims[0], rows.owned_axes))
    if capacity >= owners:  # all rows go in the first round
        return 0.0
    ops = _program(node)
    if node is not next(op for op in reversed(ops) if op.target in ENDS):
        return 0.0
    gone = [_bytes(_op(a)) for a in tensor_arguments(node) if has_rows(a) and vertex.phase == "backward"]
    return max(0.0, _peak_bytes(ops, problem, capacity / devices, 1 / owners) - sum(gone) * capacity / devices)


def saved_bytes(problem: Problem, vertex: Vertex, strategy: Strategy) -> float:
    """Return the bytes that an op of the forward that ends a round has the device keep for the rounds of its backward,
    beside what the first round saves: of each row which it is, its expert's number and its weight."""
    capacity, rows = problem.expert_capacity, strategy.inputs[0] if strategy.inputs else None
    if (
        capacity is None
        or vertex.phase != "forward"
        or vertex.node.target not in BACK
        or not rows
        or not rows.owned_axes
    ):
        return 0.0
    count = len(tensor_arguments(vertex.node)[1].meta["val"])
    return SAVED_OF_ROW * count / math.prod([problem.mesh.size(axis) for axis in rows.dims[0]])


def _program(end: fx.Node) -> list[fx.Node]:
    """Return the ops that a round runs which ends with one, in their order."""
    found, stack = {end}, [end]
    while stack:  # all that hangs together by rows
        node = stack.pop()
        near = [_op(a) for a in tensor_arguments(node) if has_rows(a)] if node.target not in _STARTS else []
        near += [u for u in _readers(node) if u.target not in _STARTS] if has_rows(node) else []
        for other in near:
            if other not in found:
                found.add(other)
                stack.append(other)
    phase = end.meta["phase"]
    needed: set[fx.Node] = set()
    stack = [n for n in found if n.meta["phase"] == phase and not has_rows(n)]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += [_op(a) for a in tensor_arguments(node) if _op(a) in found and has_rows(a)]
    return [node for node in end.graph.nodes if node in needed]


_STARTS = tuple(target for target in WAYS if target not in BACK)


def _op(node: fx.Node) -> fx.Node:
    """Return the op that makes a tensor."""
    return tensor_of(node)[0]


def _readers(node: fx.Node) -> list[fx.Node]:
    """Return the ops that read what an op makes."""
    direct = [user for user in node.users if user.op == "call_function"]
    return [r for user in direct for r in ([user] if is_op(user) else _readers(user))]


def _peak_bytes(ops: list[fx.Node], problem: Problem, of_rows: float, of_experts: float) -> float:
    """Return the most bytes alive while some ops run; parts of rows and of sums over them are on the device."""
    views = {problem.vertices[v].node for v in problem.views}
    place = {node: i for i, node in enumerate(ops)}
    base: dict[fx.Node, fx.Node] = {}
    last: dict[fx.Node, int] = {}
    for i, node in enumerate(ops):
        sources = [_op(a) for a in tensor_arguments(node) if _op(a) in place]
        base[node] = base[sources[0]] if node in views and sources else node
        for one in (node, *sources):
            last[base[one]] = i
    alive = most = 0.0
    for i, node in enumerate(ops):
        own = _bytes(node) * (of_rows if has_rows(node) or node.target in BACK else of_experts)
        alive += own if base[node] is node else 0.0
        copied = own if node.target in WAYS else 0.0
        if node.target in GROUPED and problem.is_for_gpus:
            copied = sum(_bytes(_op(a)) for a in tensor_arguments(node) if has_rows(a)) * of_rows
            copied += own if has_rows(node) else 0.0
        most = max(most, alive + copied)
        for one in {base[_op(a)] for a in tensor_arguments(node) if _op(a) in place} | {base[node]}:
            if last[one] == i:
                alive -= _bytes(one) * (of_rows if has_rows(one) or one.target in BACK else of_experts)
    return most


def _bytes(node: fx.Node) -> float:
    return float(sum(value.numel() * value.element_size() for value in values_of(node)))
