"""Define the metadata of a graph's nodes: roles, phases and tensors of a captured joint graph.

A joint graph is a `torch.fx.Graph` that computes outputs and gradients of a model from its parameters, buffers, inputs
and tangents. Its metadata, set by the capture and read by everything after it:

    node.meta["val"]      the global value: a fake tensor, or a tuple of them
    node.meta["role"]     on placeholders and constants: a Role
    node.meta["module"]   dotted path of the module that the node comes from ("model.layers.0.mlp"), "" if unknown
    node.meta["source"]   the user's "file.py:line", "" if unknown
    node.meta["phase"]    "forward" if some output of the forward needs the node, else "backward"
    output.meta["roles"]  one OutputRole an output
"""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeGuard, cast

import torch
from torch import fx
from torch.fx.node import Argument

from .._torch import op_name

RANDOM_STATE = "random_state"  # the buffer of an exported graph that becomes the placeholder of kind "random"


@dataclass(frozen=True)
class Role:
    """The meaning of a placeholder: kind "parameter" (name: its qualified name), "buffer", "input" (index as name),
    "tangent" (position of the output it belongs to), "constant", "random" (int64 (2,): seed and offset, see
    autopar/ops/counter_rng.py), "total" (a sum over the whole batch that a micro-batch needs, see
    passes/pipeline/micro_batch.py) or "cotangent" (what the whole batch gives a micro-batch's backward, by the name of
    the node that makes it, see passes/pipeline/tail.py). In a stage of a pipeline (passes/pipeline/stages.py) also
    "activation", "copy" (see passes/pipeline/compute_once.py) and "arriving", a gradient of the backward, by the name
    of the node that makes it. Where the chunks of a row follow one another "kept" and "kept_sum", what they leave each
    other, by the name of the node in whose place it is read (passes/distribute/keep_keys.py)."""

    kind: str
    name: str
    trainable: bool = False

    @property
    def is_tangent(self) -> bool:
        """Return whether the placeholder is given to the backward."""
        return self.kind in ("tangent", "cotangent", "arriving", "kept_sum")


FORWARD_OUTPUTS = ("output", "mutation", "input_mutation", "activation", "joined")
# the kinds of leaf that an output belongs to, and whose layout it therefore has, by the kind of the output
PARTNERS = {
    "gradient": ("parameter",), "input_gradient": ("input",), "mutation": ("buffer", "parameter"),
    "input_mutation": ("input",), "output": ("tangent",),
}  # fmt: skip


@dataclass(frozen=True)
class OutputRole:
    """The meaning of an output: kind "output" (name: its position), "gradient" (name of the parameter),
    "input_gradient" (of the input), "mutation" (name of the parameter or buffer that takes the value), or
    "input_mutation" (of the input), or of a micro-batch "joined", which is read when all of them have been computed
    (passes/pipeline/tail.py). In a stage of a pipeline also "activation", which goes to the next stage, and
    "returned", a gradient that goes to the one before (name: of the node)."""

    kind: str
    name: str

    @property
    def is_forward(self) -> bool:
        """Return whether the forward gives the output."""
        return self.kind in FORWARD_OUTPUTS


def values_of(node: fx.Node) -> list[torch.Tensor]:
    """Return the global fake values of a node's outputs, one for a single-output node."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [value]
    return [v for v in value if isinstance(v, torch.Tensor)] if isinstance(value, (tuple, list)) else []


def is_tensor(argument: object) -> TypeGuard[fx.Node]:
    """Return whether an argument is a node whose value is one tensor."""
    return isinstance(argument, fx.Node) and isinstance(argument.meta.get("val"), torch.Tensor)


def tensor_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the tensor-valued arguments in order of appearance in args, then kwargs; a repeated argument appears
    repeatedly."""
    return [a for a in flat_arguments(node) if is_tensor(a)]


def flat_arguments(node: fx.Node) -> list[object]:
    """Return the arguments in args, then kwargs, with lists and tuples opened."""
    return flatten((node.args, node.kwargs))


def flatten(tree: object) -> list[object]:
    """Return the leaves of nested lists, tuples and dicts in order: what a pytree gives, at a tenth of its time."""
    flat: list[object] = []

    def walk(value: object) -> None:
        if isinstance(value, (tuple, list)):
            for item in value:
                walk(item)
        elif isinstance(value, dict):
            for item in value.values():
                walk(item)
        else:
            flat.append(value)

    walk(tree)
    return flat


def is_op(node: fx.Node) -> bool:
    """Return whether the node computes something (getitem only names an output of its producer)."""
    return node.op == "call_function" and node.target is not operator.getitem


def tensor_of(node: fx.Node) -> tuple[fx.Node, int]:
    """Return the producer of a tensor and which of its outputs it is: getitem nodes are looked through."""
    if node.op == "call_function" and node.target is operator.getitem:
        return cast("tuple[fx.Node, int]", node.args)
    return node, 0


def bytes_of(value: torch.Tensor) -> int:
    """Return the bytes of the elements of a tensor, fake or real."""
    return value.numel() * value.element_size()


def operand(node: fx.Node, index: int = 0) -> fx.Node:
    """Return an argument that the op of a node takes as a tensor."""
    return cast(fx.Node, node.args[index])


def output_node(graph: fx.Graph) -> fx.Node:
    """Return a graph's output, which is its last node."""
    return cast(fx.Node, next(iter(reversed(graph.nodes))))


def outputs_of(graph: fx.Graph) -> list[tuple[fx.Node, OutputRole]]:
    """Return the values that a joint graph gives, each with its role."""
    output = output_node(graph)
    return list(zip(cast(tuple[fx.Node, ...], output.args[0]), output.meta["roles"], strict=True))


def annotate(graph: fx.Graph) -> None:
    """Give nodes that have been added to a joint graph the metadata that they lack: values, places and phases."""
    for node in graph.nodes:
        if node.op == "call_function" and "val" not in node.meta:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda a: a.meta["val"])
            node.meta["val"] = node.target(*args, **kwargs)
        node.meta.setdefault("module", "")
        node.meta.setdefault("source", "")
    mark_phases(graph)


def mark_phases(graph: fx.Graph) -> None:
    """Set meta["phase"] of every node: "forward" for the ancestors of the forward outputs, "backward" for the rest."""
    stack = [node for node, role in outputs_of(graph) if role.is_forward]
    forward: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node not in forward:
            forward.add(node)
            stack.extend(node.all_input_nodes)
    for node in graph.nodes:
        is_leaf = node.op in ("placeholder", "get_attr") and not node.meta["role"].is_tangent
        producer = tensor_of(node)[
            0
        ]  # an output of a forward op is a forward tensor, also if only the backward reads it
        node.meta["phase"] = "forward" if producer in forward or is_leaf else "backward"


def op_base_name(node: fx.Node) -> str:
    """Return the name of an op's nodes before they are numbered: that of the op, whatever the tracer called the
    node."""
    return op_name(node.target) or getattr(node.target, "__name__", str(node.target))


PREFIXES = {
    "parameter": "p", "buffer": "b", "input": "x", "tangent": "t", "random": "r", "total": "s", "joined": "j",
    "cotangent": "c", "kept": "k", "kept_sum": "g",
}  # fmt: skip


def leaf_name(role: Role) -> str:
    """Return the name of a placeholder: `p_layers_0_mlp_weight`, with b_ for buffers, x_ for inputs, t_ for tangents,
    r_ for the random state, s_ for sums over the batch, j_ for what is joined of all micro-batches, c_ for
    cotangents, k_ for kept keys and g_ for their gradients."""
    return f"{PREFIXES[role.kind]}_{re.sub(r'[^0-9A-Za-z]+', '_', role.name)}"


def renumbered(graph: fx.Graph) -> fx.Graph:
    """Return a copy whose ops are named by their kind and counted in order, so that equal graphs have equal names."""
    copy = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), made.__getitem__)
        name = op_base_name(node) if node.op == "call_function" else node.name
        made[node] = copy.create_node(node.op, node.target, args, kwargs, name)
        made[node].meta = node.meta
    return copy


def call(node: fx.Node, target: Callable[..., object], *args: Argument, **kwargs: Argument) -> fx.Node:
    """Add a new op node that remembers where `node` comes from, with its metadata but for the value."""
    new = node.graph.call_function(target, args, kwargs)
    new.meta = {key: value for key, value in node.meta.items() if key != "val"}
    return new


def is_foreign(node: fx.Node) -> bool:
    """Return whether an op is of another library than torch and autopar."""
    return getattr(node.target, "namespace", "aten") not in ("aten", "prims", "autopar")


def describe(node: fx.Node) -> str:
    """Describe a node as `mm_3: aten.mm.default (8, 16) (16, 4) -> (8, 4)` with global shapes, for errors and
    listings."""
    name = str(node.target) if node.op == "call_function" else node.op
    shapes = " ".join(str(tuple(a.meta["val"].shape)) for a in tensor_arguments(node))
    outputs = " ".join(str(tuple(v.shape)) for v in values_of(node))
    return f"{node.name}: {name} {shapes} -> {outputs}"


def fingerprint(graph: fx.Graph) -> str:
    """Return the hash of a joint graph: every node with its op, constants and global shapes."""
    digest = hashlib.sha256()
    for node in graph.nodes:
        shapes = [(tuple(v.shape), str(v.dtype)) for v in values_of(node)]
        arguments = "" if node.op in ("placeholder", "get_attr") else f"{node.args} {dict(node.kwargs)}"
        digest.update(f"{node.name} {node.op} {node.target} {arguments} {shapes}\n".encode())
    return digest.hexdigest()
