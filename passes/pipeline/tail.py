"""Split what needs all samples of a batch off the graph of its micro-batches: the tail of a step.

A loss may be a function of sums over all tokens (the load that experts have times how probable a router finds them) or
of all pairs of samples (a contrastive loss). A step then has three parts:

    forward   of each micro-batch, which ends with the values that the tail reads ("joined")
    tail      once, from those of all micro-batches, sums added up and samples joined: the loss, and the gradients
              ("cotangents") of what it read, as far as they are the same for all samples or have a part for each
    backward  of each micro-batch, which takes its part of the cotangents

The tail has the first ops that need all samples and what follows from them in the forward; of the backward, what is
computed from values of the tail alone. Its last ops go back to the micro-batches where they make a tensor no smaller
than the one that they read (a sum's gradient, which is copied to all samples), so that it stays small. It has no
weights: a batch norm in the middle of a model would make most of the model its tail, and is refused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ..._torch import graph_module
from ...errors import MicroBatchError
from ...ir.graph import OutputRole, Role, bytes_of, is_op, is_tensor, leaf_name, output_node, outputs_of, tensor_of
from ...ir.layout import Layout
from ...ops.streams import stream_of
from ...schedule.actions import Schedule
from .batch_axis import BatchAxis, NeedsAllSamples, batch_axis

aten = torch.ops.aten


@dataclass(frozen=True)
class Tail:
    """graph_module: (values of role "joined", tangents) -> (outputs of the call, then cotangents), of the whole batch.
    joined, cotangents: their layouts over the axis of micro-batches, by name. needs: the error of a step that cannot
    run it, about the first op that needs all samples. run: what runs the graph where the sizes are not its own."""

    graph_module: fx.GraphModule
    joined: dict[str, Layout]
    cotangents: dict[str, Layout]
    needs: MicroBatchError
    run: Callable[..., Sequence[torch.Tensor]] | None = None

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return the outputs of the call that the tail gives, by their position."""
        return tuple(role.name for _, role in outputs_of(self.graph_module.graph) if role.kind == "output")


def without_tail(
    joint: fx.GraphModule, micro_batches: int, samples: int
) -> tuple[fx.GraphModule, BatchAxis, Tail | None]:
    """Return the joint graph without its tail, its sharding over the axis of micro-batches, and the tail, if it has
    one. Raises MicroBatchError for what cannot be computed so, with the first op that needs all samples."""
    nodes = {node.name: node for node in joint.graph.nodes}
    seeds: set[fx.Node] = set()
    first: NeedsAllSamples | None = None
    while True:
        found = _ops_of_tail(joint.graph, seeds)
        if first is not None and not _is_possible(joint.graph, found):
            raise first
        body, once = _split(joint, found) if found else (joint, None)
        try:
            axis = batch_axis(body.graph, micro_batches, samples)
        except NeedsAllSamples as error:
            first = first or error
            seed = nodes.get(error.op)
            if seed is not None and seed.meta["phase"] == "backward" and error.argument in nodes:
                seed = tensor_of(nodes[error.argument])[0]
            if seed is None or seed in found or not is_op(seed):
                raise first from None
            seeds.add(seed)
        except MicroBatchError as error:
            raise first or error from None
        else:
            return body, axis, None if once is None or first is None else _with_layouts(once, body.graph, axis, first)


def check_waits(tail: Tail | None, schedule: Schedule) -> None:
    """Raise MicroBatchError for a schedule that cannot run a tail, if there is one: in which the last stage does not
    run the forwards of all micro-batches before its first backward."""
    if tail is not None and not schedule.ends_forwards_first:
        raise MicroBatchError(
            f"{tail.needs.message}; {schedule.name} begins with backwards before that",
            node=tail.needs.node,
            source=tail.needs.source,
            fix='use schedule="gpipe", whose forwards all come first, or one micro-batch',
        )


def _ops_of_tail(graph: fx.Graph, seeds: Collection[fx.Node]) -> set[fx.Node]:
    """Return the ops of the tail that begins with `seeds`."""
    early: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and node.meta["phase"] == "forward":
            if node in seeds or not early.isdisjoint(node.all_input_nodes):
                early.add(node)
    late = _pulled([node for node in seeds if node.meta["phase"] == "backward"])
    return early | _trimmed(_backward_of(graph, early | late) | late, seeds) if early or late else early


def _pulled(seeds: Iterable[fx.Node]) -> set[fx.Node]:
    """Return ops of the backward with all in the backward that they are computed from."""
    found, stack = set[fx.Node](), list(seeds)
    while stack:
        node = stack.pop()
        if node not in found and node.op == "call_function" and node.meta["phase"] == "backward":
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def _backward_of(graph: fx.Graph, tail: set[fx.Node]) -> set[fx.Node]:
    """Return the ops of the backward that are computed from values that the tail has, and from at least one of its
    own or of those that it reads."""
    own = tail | {a for node in tail for a in node.all_input_nodes if node.meta["phase"] == "forward"}
    given = _of_tangents_alone(graph)
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and node.meta["phase"] == "backward" and node not in given:
            if all(a in own or a in given or a in found for a in node.all_input_nodes):
                found.add(node)
    return found


def _of_tangents_alone(graph: fx.Graph) -> set[fx.Node]:
    """Return tangents, constants, and what is computed from those alone, which tail and micro-batches may both do."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "get_attr" or node.op == "placeholder" and node.meta["role"].kind == "tangent":
            found.add(node)
        elif node.op == "call_function" and found.issuperset(node.all_input_nodes) and stream_of(node) is None:
            found.add(node)
    return found


def _trimmed(late: set[fx.Node], seeds: Collection[fx.Node]) -> set[fx.Node]:
    """Return ops of the tail's backward without the last ones that read one tensor and make none smaller."""
    kept = set(late)
    for node in sorted(late, reverse=True):
        (*others,) = node.all_input_nodes
        is_last = is_tensor(node) and tensor_of(node)[0] is node and kept.isdisjoint(node.users) and node not in seeds
        if is_last and len(others) == 1 and is_tensor(others[0]) and _bytes(others[0]) <= _bytes(node):
            kept.remove(node)
    return kept


def _bytes(node: fx.Node) -> int:
    return bytes_of(node.meta["val"])


def _is_possible(graph: fx.Graph, tail: set[fx.Node]) -> bool:
    """Return whether ops can run once a step: they draw no numbers, read no weights and nothing that a micro-batch's
    backward makes, and write to nothing."""
    of_weights, given = _of_parameters_alone(graph), _of_tangents_alone(graph)
    read = {a for node in tail for a in node.all_input_nodes} - tail - given
    writes = any(value in tail and "mutation" in role.kind for value, role in outputs_of(graph))
    weights = any(value in of_weights and value.meta["val"].dim() for value in read)
    late = any(value.meta["phase"] == "backward" for value in read)
    draws = any(stream_of(node) is not None for node in tail)
    return not (writes or weights or late or draws) and all(map(is_tensor, read))


def _of_parameters_alone(graph: fx.Graph) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" and node.meta["role"].kind == "parameter":
            found.add(node)
        elif node.op == "call_function" and node.all_input_nodes and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def _split(joint: fx.GraphModule, tail: set[fx.Node]) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return (the graph of the micro-batches, that of the tail)."""
    given = _of_tangents_alone(joint.graph)
    order = [node for node in joint.graph.nodes if node.op != "output"]
    read = {a for node in tail for a in node.all_input_nodes} - tail - given
    returned = {value for value, role in outputs_of(joint.graph) if role.kind == "gradient"}
    made = [n for n in order if n in tail and is_tensor(n) and (n in returned or not tail.issuperset(_readers(n)))]
    joined = [node for node in order if node in read]
    return _body(joint, order, tail, joined, made), _once(joint, order, tail, given, joined, made)


def _readers(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if user.op != "output"]


def _body(
    joint: fx.GraphModule, order: list[fx.Node], tail: set[fx.Node], joined: list[fx.Node], made: list[fx.Node]
) -> fx.GraphModule:
    """Return the joint graph that gives the values `joined` and takes cotangents in the place of those `made`, both
    through ops of their own, which are in the last stage of a pipeline."""
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in (n for n in order if n.op == "placeholder"):
        new[node] = graph.node_copy(node)
    leaves = [graph.placeholder(leaf_name(role)) for role in (Role("cotangent", node.name) for node in made)]
    ops = [n for n in order if n.op != "placeholder" and n not in tail]
    for node in (n for n in ops if n.meta["phase"] == "forward"):
        new[node] = graph.node_copy(node, new.__getitem__)
    ends = [_passed(graph, new[node], leaf_name(Role("joined", node.name)), node, "forward") for node in joined]
    for node, leaf in zip(made, leaves):
        leaf.meta = {**node.meta, "role": Role("cotangent", node.name), "phase": "backward"}
        new[node] = _passed(graph, leaf, node.name, node, "backward")
    for node in (n for n in ops if n.meta["phase"] == "backward"):
        new[node] = graph.node_copy(node, new.__getitem__)
    outputs = [(new[v], r) for v, r in outputs_of(joint.graph) if r.kind != "output" or v not in tail]
    outputs += [(end, OutputRole("joined", node.name)) for end, node in zip(ends, joined)]
    output = graph.output(tuple(value for value, _ in outputs))
    output.meta = {**output_node(joint.graph).meta, "roles": [role for _, role in outputs]}
    graph.eliminate_dead_code()
    graph.lint()
    return graph_module(joint, graph, type(joint).__name__)


def _passed(graph: fx.Graph, value: fx.Node, name: str, like: fx.Node, phase: str) -> fx.Node:
    made = graph.create_node("call_function", aten.alias.default, (value,), {}, name)
    made.meta = {key: found for key, found in like.meta.items() if key != "role"} | {"phase": phase}
    return made


def _once(
    joint: fx.GraphModule,
    order: list[fx.Node],
    tail: set[fx.Node],
    given: set[fx.Node],
    joined: list[fx.Node],
    made: list[fx.Node],
) -> fx.GraphModule:
    """Return the graph of the tail."""
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in joined:
        new[node] = graph.placeholder(leaf_name(Role("joined", node.name)))
        new[node].meta = {**node.meta, "role": Role("joined", node.name), "phase": "forward"}
    for node in order:
        if node in given and node.op == "placeholder":
            new[node] = graph.node_copy(node)
    for node in order:
        if node in tail or node in given and node.op != "placeholder":
            new[node] = graph.node_copy(node, new.__getitem__)
    outputs = [(new[v], r) for v, r in outputs_of(joint.graph) if r.kind == "output" and v in tail]
    outputs += [(new[node], OutputRole("cotangent", node.name)) for node in made]
    graph.output(tuple(value for value, _ in outputs)).meta["roles"] = [role for _, role in outputs]
    graph.eliminate_dead_code()
    for node in list(graph.nodes):
        if node.op == "placeholder" and not node.users and node.meta["role"].kind == "tangent":
            graph.erase_node(node)
    graph.lint()
    return graph_module(joint, graph, "Tail")


def _with_layouts(once: fx.GraphModule, body: fx.Graph, axis: BatchAxis, needs: MicroBatchError) -> Tail:
    ends = zip(outputs_of(body), axis.outputs)
    joined = {role.name: layout for (_, role), layout in ends if layout is not None and role.kind == "joined"}
    leaves = [n for n in body.nodes if n.op == "placeholder" and n.meta["role"].kind == "cotangent"]
    cotangents = {n.meta["role"].name: axis.leaves[n.name] for n in leaves}
    return Tail(once, joined, cotangents, needs)
