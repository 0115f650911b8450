"""The vertices of a joint graph and the uses of tensors between them.

A vertex is an op, a leaf (parameter, buffer, input, tangent, constant) or an output. Some couplings are part of the
problem itself, such as a gradient that must arrive in the layout of its parameter: such a use has the parameter as
consumer and `STATE` as slot.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import fx

from ...cost.memory import Optimizer, StateBytes
from ...ir.casts import output_of, own_casts
from ...ir.graph import PARTNERS, flatten, is_op, output_node, tensor_arguments, tensor_of, values_of
from ...ops.streams import STREAM
from .hidden_matrices import hidden_matrices
from .weight_codes import mark_weight_codes

JOINED = "joined"  # role of an output that the tail of a step reads (passes/pipeline/tail.py)
STATE = -1  # slot of a use that takes the layout of the consumer itself (a gradient takes its parameter's)


@dataclass
class Vertex:
    """One node of the unfolded graph. `inputs` are tensors as (vertex index, output index).

    `casts` are nodes that belong to the vertex, by output: the cast of a parameter to what it computes in, and that of
    a gradient to its parameter's type. So a parameter is never gathered before its cast, nor a gradient reduced before
    its own."""

    index: int
    name: str
    kind: str  # "op", "parameter", "buffer", "input", "tangent", "constant", "random", "output"
    node: fx.Node
    phase: str
    inputs: list[tuple[int, int]] = field(default_factory=list)
    signature: tuple = ()
    cls: int = -1
    casts: dict[int, fx.Node] = field(default_factory=dict)
    block: int | None = None  # of a compact graph (see autopar/frontend/repeated_blocks.py)
    is_matrix: bool = False  # which Muon updates
    quantizes_weight: bool = False  # to FP8, or transposes it for that

    @property
    def is_joined(self) -> bool:
        """Return whether the vertex is an output that the tail of a step reads."""
        return self.kind == "output" and self.signature[1] == JOINED

    @cached_property
    def values(self) -> list[torch.Tensor]:
        """Return what the vertex hands on, one tensor an output."""
        values = values_of(self.node)
        for i, cast in self.casts.items():
            values[i] = cast.meta["val"]
        return values

    def tensor(self, output: int) -> tuple[fx.Node, int]:
        """Return an output as the lowering knows it: its node, and which output of that node it is."""
        return (self.casts[output], 0) if output in self.casts else (self.node, output)

    def state_bytes(self, optimizer: Optimizer) -> StateBytes:
        """Return the bytes of an element of a parameter, for each kind of its state."""
        copy = self.casts[0].meta["val"].element_size() if 0 in self.casts else 0
        if optimizer.orthogonalizes and not self.is_matrix:
            optimizer = Optimizer.of("adamw", optimizer.state_bytes)
        return StateBytes.of(optimizer, self.node.meta["val"].element_size(), copy)


@dataclass(frozen=True)
class Use:
    """A tensor read by a consumer, which wants it in the layout of input `slot` of its strategy (or its own: STATE)."""

    producer: int
    output: int
    consumer: int
    slot: int
    phase: str


def vertices_of(graph: fx.Graph) -> tuple[list[Vertex], list[Use]]:
    """Return the vertices of a joint graph, each without a class, and the uses of their tensors, those by the graph's
    outputs last."""
    vertices: list[Vertex] = []
    uses: list[Use] = []
    where: dict[fx.Node, int] = {}
    casts = own_casts(graph)
    hidden = hidden_matrices(graph)
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
            v = add(
                node.name,
                role.kind,
                node,
                node.meta["phase"],
                (role.kind, key, tuple(value.shape), str(value.dtype), role.trainable),
            )
            where[node] = v.index
            v.is_matrix = node in hidden
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
    mark_weight_codes(vertices)
    by_role = {(v.kind, v.node.meta["role"].name): v for v in vertices if v.node.op == "placeholder"}
    output = output_node(graph)
    for node, role in zip(output.args[0], output.meta["roles"]):
        p, o = tensor(node)
        partner = next(filter(None, (by_role.get((kind, role.name)) for kind in PARTNERS.get(role.kind, ()))), None)
        phase = "backward" if role.kind in ("gradient", "input_gradient") else "forward"
        is_loss = role.kind == "output" and not node.meta["val"].dim()
        if partner is not None and not is_loss:
            uses.append(Use(p, o, partner.index, STATE, phase))
        else:
            key = _no_digits(role.name) if role.kind == JOINED else role.name
            v = add(f"{role.kind}:{role.name}", "output", node, phase, ("output", role.kind, key))
            v.inputs = [(p, o)]
            uses.append(Use(p, o, v.index, 0, phase))
    return vertices, uses


def _constants(node: fx.Node) -> list:
    """Return the arguments that are not tensors, nested ones too, without node names and without stream numbers, which
    change no price."""
    stream = STREAM.get(node.target)
    args = [a for i, a in enumerate(node.args) if i != stream]
    return [a for a in flatten((args, node.kwargs)) if not isinstance(a, fx.Node)]


def _no_digits(name: str) -> str:
    return re.sub(r"\d+", "#", name)
