"""The joint graph as an optimization problem: vertices with strategies to choose from, and uses of tensors between them.

A vertex is an op, a leaf (parameter, buffer, input, tangent, constant) or an output. Every vertex belongs to a class; the
vertices of a class share one choice. Classes come from two places: repeated blocks (autopar/planner/fold.py), and couplings
that are part of the problem itself, such as a gradient that must arrive in the layout of its parameter: such a use has the
parameter as consumer and `STATE` as slot.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import fx

from .. import rules
from ..capture import Captured
from ..compact import Compact
from ..cost.compute import ComputeCost, fraction, fused_inputs
from ..cost.memory import StateBytes
from ..graph import bytes_of, flatten, is_op, output_node, tensor_arguments, tensor_of, values_of
from ..layout import Layout, is_even, is_legal, largest_local_numel
from ..mesh import Mesh
from ..ops_random import STREAM
from ..rules import Rule, Strategy
from .casts import output_of, own_casts

aten = torch.ops.aten
STATE = -1  # slot of a use that takes the layout of the consumer itself (a gradient takes its parameter's)

# Partial values pass only through these: more pass-through ops never improved a plan and grow the problem.
PASS_PARTIAL = {
    aten.add.Tensor, aten.sub.Tensor, aten.reshape.default, aten.transpose.int, aten.permute.default, aten.t.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten._to_copy.default, aten.cat.default, aten.neg.default,
}  # fmt: skip


@dataclass
class Vertex:
    """One node of the unfolded graph. `inputs` are tensors as (vertex index, output index).

    `casts` are nodes that belong to the vertex, by output: the cast of a parameter to what it computes in, and that of a gradient
    to its parameter's type. So a parameter is never gathered before its cast, nor a gradient reduced before its own."""

    index: int
    name: str
    kind: str  # "op", "parameter", "buffer", "input", "tangent", "constant", "random", "output"
    node: fx.Node | None
    phase: str
    inputs: list[tuple[int, int]] = field(default_factory=list)
    signature: tuple = ()
    cls: int = -1
    casts: dict[int, fx.Node] = field(default_factory=dict)
    block: int | None = None  # of a compact graph (see autopar/compact.py)
    copies: int = 1  # vertices of the whole graph that it stands for

    @property
    def values(self) -> list[torch.Tensor]:
        """What the vertex hands on, one tensor an output."""
        return [self.casts[i].meta["val"] if i in self.casts else value for i, value in enumerate(values_of(self.node))]

    def tensor(self, output: int) -> tuple[fx.Node, int]:
        """An output as the lowering knows it: its node, and which output of that node it is."""
        return (self.casts[output], 0) if output in self.casts else (self.node, output)

    def state_bytes(self, optimizer: str) -> StateBytes:
        """Of a parameter: bytes of an element."""
        copy = self.casts[0].meta["val"].element_size() if 0 in self.casts else 0
        return StateBytes.of(optimizer, self.node.meta["val"].element_size(), copy)


@dataclass(frozen=True)
class Use:
    """A tensor read by a consumer, which wants it in the layout of input `slot` of its strategy (or its own: STATE)."""

    producer: int
    output: int
    consumer: int
    slot: int
    phase: str


@dataclass
class Choices:
    """What a class may choose: strategies with their price for one of its `copies` vertices of the whole graph."""

    strategies: list[Strategy]
    seconds: np.ndarray
    resident_bytes: np.ndarray
    gradient_bytes: np.ndarray
    members: list[int] = field(default_factory=list)
    copies: int = 0

    def layouts(self, slot: int) -> list[Layout]:
        """Layout at an input slot (or the vertex's own layout: STATE) for every strategy."""
        return [s.outputs[0] if slot == STATE else s.inputs[slot] for s in self.strategies]

    def output_layouts(self, output: int) -> list[Layout]:
        return [s.outputs[output] for s in self.strategies]


@dataclass
class Problem:
    """Everything the solver reads. Tensors are keyed (vertex, output). `compact`: the graph that is planned instead of `whole`."""

    mesh: Mesh
    vertices: list[Vertex]
    uses: list[Use]
    classes: dict[int, Choices]
    tensor_bytes: dict[tuple[int, int], int]
    unruled: list[fx.Node]
    graph: fx.Graph
    rule_of: dict[int, Rule | None]
    output_uses: list[Use]  # one an output of the graph
    whole: fx.Graph
    optimizer: str
    compact: Compact | None = None
    uses_of: dict[tuple[int, int], list[Use]] | None = None  # filled by autopar/planner/evaluate.py
    first: int = 0  # of the blocks that the compact graph leaves out, those that decide as block 2 does

    def split(self, first: int) -> None:
        """Let `first` of the blocks left out decide as block 2 does, the others as block 5."""
        if first == self.first:
            return
        self.first = first
        for v in self.vertices:
            if v.block is not None:
                v.copies = len(self.compact.stands_for(v.block, first))

    def whole_nodes(self, node: fx.Node) -> list[fx.Node]:
        """The nodes of the whole graph that a node of the planned graph stands for."""
        return [node] if self.compact is None else self.compact.nodes(node, self.first)

    def choices(self, vertex: int) -> Choices:
        return self.classes[self.vertices[vertex].cls]


def build(
    captured: Captured,
    mesh: Mesh,
    hardware,
    optimizer: str,
    fold: Callable[[list[Vertex], list[Use]], list[int]],
    fixed: dict[str, Layout] | None = None,
    pins: dict[str, str] | None = None,
) -> Problem:
    """The problem of a captured joint graph. `fixed` gives layouts by placeholder name. `fold` gives the classes; leaves that
    different `pins` name do not share one."""
    compact = captured.compact
    graph = compact.graph if compact else captured.graph
    vertices, uses = vertices_of(graph)
    for v in vertices if compact else ():
        v.block = compact.block(v.node) if v.kind != "output" else None
    part_sets = rules.propagate_parts(graph)
    rule_of: dict[int, Rule | None] = {}
    unruled = []
    tensors_of = {
        v.index: [(vertices[p].node, o) for p, o in v.inputs] + [(v.node, o) for o in range(len(values_of(v.node)))]
        for v in vertices
        if v.kind == "op"
    }
    for v in vertices:
        if v.kind == "op":
            rule = rule_of[v.index] = rules.rule_of(v.node)
            if rule is None:
                unruled.append(v.node)
            v.signature = (*v.signature, tuple(part_sets.get(t) for t in tensors_of[v.index]))
        elif v.kind == "parameter":
            v.signature = (*v.signature, str(part_sets.get((v.node, 0))))
        if v.kind in ("parameter", "input", "buffer"):
            named = [p for p in pins or {} if fnmatch.fnmatchcase(v.node.meta["role"].name, p)]
            v.signature = (*v.signature, str((fixed or {}).get(v.name)), tuple(named))
    for v, cls in zip(vertices, fold(vertices, uses)):
        v.cls = cls
    _couple(vertices, uses)
    cost = ComputeCost(hardware)
    classes: dict[int, Choices] = {}
    for v in vertices:
        if v.cls not in classes:
            pins = (fixed or {}).get(v.name)
            classes[v.cls] = _choices(vertices[v.cls], rule_of.get(v.cls), part_sets, mesh, cost, optimizer, pins)
        classes[v.cls].members.append(v.index)
    tensor_bytes = {
        (v.index, i): bytes_of(value) for v in vertices if v.node is not None and v.kind != "output"
        for i, value in enumerate(v.values)
    }  # fmt: skip
    outputs = uses[len(uses) - len(output_node(graph).args[0]) :]
    problem = Problem(
        mesh, vertices, uses, classes, tensor_bytes, unruled, graph, rule_of, outputs, captured.graph, optimizer, compact
    )
    if compact:
        problem.split(compact.most // 2)
    for v in vertices:
        classes[v.cls].copies += v.copies
    return problem


def vertices_of(graph: fx.Graph) -> tuple[list[Vertex], list[Use]]:
    """The vertices of a joint graph, each without a class, and the uses of their tensors, those by the graph's outputs last."""
    vertices: list[Vertex] = []
    uses: list[Use] = []
    where: dict[fx.Node, int] = {}
    casts = own_casts(graph, PASS_PARTIAL)
    source_of = {cast: source for source, cast in casts.items()}

    def add(name, kind, node, phase, signature) -> Vertex:
        vertex = Vertex(len(vertices), name, kind, node, phase, signature=signature)
        vertices.append(vertex)
        return vertex

    def tensor(node: fx.Node) -> tuple[int, int]:
        source = source_of.get(node, node)
        return where[tensor_of(source)[0]], output_of(source)

    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            role, value = node.meta["role"], node.meta["val"]
            if not isinstance(value, torch.Tensor):
                continue
            key = role.name if role.kind in ("input", "tangent", "constant") else _no_digits(role.name)
            v = add(node.name, role.kind, node, node.meta["phase"],
                    (role.kind, key, tuple(value.shape), str(value.dtype), role.trainable))  # fmt: skip
            where[node] = v.index
            if node in casts:
                v.casts[0] = casts[node]
                v.signature = (*v.signature, str(v.values[0].dtype))
        elif is_op(node) and values_of(node) and node not in source_of:
            v = add(node.name, "op", node, node.meta["phase"], ())
            v.casts = {output_of(n): casts[n] for n in (node, *node.users) if n in casts and tensor_of(n)[0] is node}
            shapes = tuple((tuple(x.shape), str(x.dtype)) for x in v.values)
            constants = tuple(str(a) for a in _constants(node))
            v.signature = (str(node.target), shapes, constants, v.phase)
            v.inputs = [tensor(a) for a in tensor_arguments(node)]
            where[node] = v.index
            uses += [Use(p, o, v.index, slot, v.phase) for slot, (p, o) in enumerate(v.inputs)]
    by_role = {(v.kind, v.node.meta["role"].name): v for v in vertices if v.node.op == "placeholder"}
    output = output_node(graph)
    for node, role in zip(output.args[0], output.meta["roles"]):
        p, o = tensor(node)
        partner = {
            "gradient": by_role.get(("parameter", role.name)),
            "mutation": by_role.get(("buffer", role.name)),
            "output": by_role.get(("tangent", role.name)),
        }.get(role.kind)
        phase = "backward" if role.kind in ("gradient", "input_gradient") else "forward"
        is_loss = role.kind == "output" and not node.meta["val"].dim()
        if partner is not None and not is_loss:
            uses.append(Use(p, o, partner.index, STATE, phase))
        else:
            v = add(f"{role.kind}:{role.name}", "output", node, phase, ("output", role.kind, role.name))
            v.inputs = [(p, o)]
            uses.append(Use(p, o, v.index, 0, phase))
    return vertices, uses


def _constants(node: fx.Node) -> list:
    """Arguments that are not tensors, nested ones too, with node names left out, and stream numbers, which change no price."""
    stream = STREAM.get(node.target)
    args = [a for i, a in enumerate(node.args) if i != stream]
    return [a for a in flatten((args, node.kwargs)) if not isinstance(a, fx.Node)]


def _no_digits(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _couple(vertices: list[Vertex], uses: list[Use]) -> None:
    """Name each class after its first member, so that the representative's index is the class."""
    first: dict[int, int] = {}
    for v in vertices:
        v.cls = first.setdefault(v.cls, v.index)


def _choices(
    v: Vertex, rule, part_sets, mesh: Mesh, cost: ComputeCost, optimizer: str, pinned: Layout | None
) -> Choices:
    if v.kind == "op":
        return _op_choices(v.node, rule, part_sets, mesh, cost)
    value = v.node.meta["val"]
    shape = tuple(value.shape)
    if v.kind == "output":
        options = [Layout.replicated(0)] if not shape else leaf_layouts(shape, mesh, {}, orders=False)
        return _free([Strategy((o,), (o,), (), 1) for o in options])
    if pinned is not None:
        options = [pinned]
    elif v.kind == "parameter":
        parts = dict(enumerate(part_sets.get((v.node, 0), ())))
        options = leaf_layouts(shape, mesh, parts, orders=True)
    elif v.kind in ("input", "tangent"):
        options = leaf_layouts(shape, mesh, {}, orders=False)
    else:
        options = [Layout.replicated(len(shape))]
    choices = _free([Strategy((), (o,), (), 1) for o in options])
    elements = np.array([float(largest_local_numel(shape, o, mesh)) for o in options])
    if v.kind == "parameter":
        state, trainable = v.state_bytes(optimizer), v.node.meta["role"].trainable
        choices.resident_bytes = elements * state.resident(trainable)
        choices.gradient_bytes = elements * (state.gradient if trainable else 0)
    elif v.kind in ("buffer", "constant"):
        choices.resident_bytes = elements * value.element_size()
    return choices


def _free(options: list[Strategy]) -> Choices:
    """Choices that cost nothing."""
    return Choices(options, *(np.zeros(len(options)) for _ in range(3)))


def leaf_layouts(shape, mesh: Mesh, parts: dict[int, frozenset[int]], orders: bool) -> list[Layout]:
    """All legal layouts without Partial: per axis a dim or none; `orders` also permutes axes that share a dim (a ZeRO-sharded
    column-parallel weight is cut by tp first); `parts` adds layouts inside the parts of a dim."""
    result: dict[Layout, None] = {}
    names = [axis for axis in mesh.names if mesh.size(axis) > 1] or list(mesh.names)
    for placed in itertools.product([None, *range(len(shape))], repeat=len(names)):
        for order in itertools.permutations(range(len(names))) if orders else [range(len(names))]:
            dims = tuple(tuple(names[i] for i in order if placed[i] == d) for d in range(len(shape)))
            layout = Layout(dims)
            in_mesh_order = list(order) == list(range(len(names)))
            # DTensor cuts unevenly only in the mesh's order
            if is_legal(shape, layout, mesh) and (in_mesh_order or is_even(shape, layout, mesh)):
                result[layout] = None
            for d, counts in parts.items():
                for p in counts:
                    if len(dims[d]) == 1 and p > 1:
                        inside = replace(layout, parts=tuple(p if e == d else 1 for e in range(len(shape))))
                        if is_legal(shape, inside, mesh):
                            result[inside] = None
    return list(result)


def _op_choices(node: fx.Node, rule: Rule | None, part_sets, mesh: Mesh, cost: ComputeCost) -> Choices:
    arguments = [a.meta["val"] for a in tensor_arguments(node)]
    outputs = values_of(node)
    if rule is None:
        whole = Strategy(
            tuple(Layout.replicated(a.dim()) for a in arguments),
            tuple(Layout.replicated(o.dim()) for o in outputs),
            (),
            1,
        )
        options = [whole]
    else:
        if node.target not in PASS_PARTIAL:
            rule = replace(rule, linear=())
        parts = rules.factor_parts(node, rule, part_sets)
        options = rules.strategies(rule, [a.shape for a in arguments], [o.shape for o in outputs], mesh, parts)
    fused = fused_inputs(node)
    is_fused_away = len(node.users) == 1 and any(
        user for user in node.users if any(f and a is node for f, a in zip(fused_inputs(user), tensor_arguments(user)))
    )
    seconds = []
    for option in options:
        traffic = 0.0
        for value, layout, skip in zip(arguments, option.inputs, fused):
            traffic += 0.0 if skip else bytes_of(value) * fraction(layout, mesh)
        if not is_fused_away:
            traffic += sum(bytes_of(value) * fraction(layout, mesh) for value, layout in zip(outputs, option.outputs))
        seconds.append(cost.seconds(node, option, mesh, traffic))
    choices = _free(options)
    choices.seconds = np.array(seconds)
    return choices
