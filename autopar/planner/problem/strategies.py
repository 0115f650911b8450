"""List what a vertex may choose: strategies with their seconds and bytes, in arrays that the solver adds up."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import numpy as np
from torch import fx

from ... import rules
from ...cost.compute import ComputeCost, fused_inputs
from ...cost.exchange import WAYS, exchange_seconds, goes_once, link_seconds, moves_rows
from ...cost.expert_load import load_of, sent_load_of
from ...cost.memory import Optimizer
from ...cost.orthogonalize import OrthogonalizeCost
from ...cost.update import UpdateCost
from ...ir.casts import PASS_PARTIAL
from ...ir.graph import bytes_of, is_foreign, tensor_arguments, tensor_of, values_of
from ...ir.layout import ZIGZAG, Layout, fraction, is_even, is_legal, largest_local_numel
from ...ir.mesh import Mesh
from ...ops import OF_KEPT_KEYS
from ...rules import Rule, Strategy
from ...rules.lookup import has_rows
from .offload import Offload
from .vertices import STATE, Vertex


@dataclass
class Choices:
    """The strategies that a class may choose, with their price for one of its `copies` vertices of the whole graph."""

    strategies: list[Strategy]
    seconds: np.ndarray
    resident_bytes: np.ndarray
    gradient_bytes: np.ndarray
    members: list[int] = field(default_factory=list)
    copies: int = 0

    def layouts(self, slot: int) -> list[Layout]:
        """Return the layout at an input slot (or the vertex's own layout: STATE) for every strategy."""
        return [s.outputs[0] if slot == STATE else s.inputs[slot] for s in self.strategies]

    def output_layouts(self, output: int) -> list[Layout]:
        """Return the layout of an output for every strategy."""
        return [s.outputs[output] for s in self.strategies]


def choices_of(
    v: Vertex,
    rule,
    part_sets,
    mesh: Mesh,
    cost: ComputeCost,
    optimizer: Optimizer,
    pinned: Layout | None,
    offload: Offload,
    update: UpdateCost,
    orthogonalize: OrthogonalizeCost | None = None,
) -> Choices:
    """Return what a vertex may choose: an op the strategies of its rule; an output, parameter, input or tangent all its
    legal layouts; any other leaf to be replicated. A leaf may only have the layout `pinned` if there is one.
    `orthogonalize`: the price of what the optimizer does with matrices, if it does."""
    if v.kind == "op":
        found = _op_choices(v.node, rule, part_sets, mesh, cost)
        found.seconds += [_cast_seconds(v, s, mesh, cost) for s in found.strategies]
        return found
    value = v.node.meta["val"]
    shape = tuple(value.shape)
    if v.kind == "output":
        producer, output = tensor_of(v.node)
        zigzag = _zigzag(producer, output, part_sets)
        is_whole = not shape or v.is_joined  # which every device reads in the tail of the step
        options = [Layout.replicated(len(shape))] if is_whole else leaf_layouts(shape, mesh, zigzag, orders=False)
        return _free([Strategy((o,), (o,), (), 1) for o in options])
    if pinned is not None:
        options = [pinned]
    elif v.kind == "parameter":
        parts = {d: counts - {ZIGZAG} for d, counts in enumerate(part_sets.get((v.node, 0), ()))}
        options = leaf_layouts(shape, mesh, parts, orders=True)
    elif v.kind in ("input", "tangent"):
        options = leaf_layouts(shape, mesh, _zigzag(v.node, 0, part_sets), orders=False)
    else:
        options = [Layout.replicated(len(shape))]
    elements = np.array([float(largest_local_numel(shape, o, mesh)) for o in options])
    if v.kind == "parameter":
        found = _parameter_choices(v, options, elements, optimizer, offload, update)
        if orthogonalize is not None and v.is_matrix:
            found.seconds += [orthogonalize.pass_seconds(shape, s.outputs[0]) for s in found.strategies]
        return found
    choices = _free([Strategy((), (o,), (), 1) for o in options])
    if v.kind in ("buffer", "constant"):
        choices.resident_bytes = elements * value.element_size()
    return choices


def _zigzag(producer: fx.Node, output: int, part_sets) -> dict[int, frozenset[int]]:
    """Return the dims of a tensor, other than an input with a gradient, that may be cut in zigzag between the graph and
    who calls it."""
    role = producer.meta.get("role") if producer.op == "placeholder" else None
    if role is not None and role.kind == "input" and producer.meta["val"].is_floating_point():
        return {}
    return {d: counts & {ZIGZAG} for d, counts in enumerate(part_sets.get((producer, output), ()))}


def _parameter_choices(
    v: Vertex, options: list[Layout], elements: np.ndarray, optimizer: Optimizer, offload: Offload, update: UpdateCost
) -> Choices:
    """Return every layout in every kind of memory that a parameter may be in. Of one on the host the device holds the
    copy that computes."""
    state, trainable, memory_kinds = v.state_bytes(optimizer), v.node.meta["role"].trainable, offload.memory_kinds(v)
    choices = _free([Strategy((), (o,), (), 1, on_host) for on_host in memory_kinds for o in options])
    seconds, resident, gradient = [], [], []
    for on_host in memory_kinds:
        seconds.append((offload.cost if on_host else update).pass_seconds(elements, state, trainable))
        resident.append(elements * (state.computing if on_host else state.resident(trainable)))
        gradient.append(elements * (state.gradient if trainable and not on_host else 0))
    choices.seconds, choices.resident_bytes, choices.gradient_bytes = map(np.concatenate, (seconds, resident, gradient))
    return choices


def in_memory(
    v: Vertex, choices: Choices, mesh: Mesh, optimizer: Optimizer, offload: Offload, update: UpdateCost
) -> Choices:
    """Return the layouts that a class of parameters may choose, in the kinds of memory that `offload` says."""
    options = list(dict.fromkeys(s.outputs[0] for s in choices.strategies))
    elements = np.array([float(largest_local_numel(tuple(v.node.meta["val"].shape), o, mesh)) for o in options])
    found = _parameter_choices(v, options, elements, optimizer, offload, update)
    return replace(found, members=choices.members, copies=choices.copies)


def _free(options: list[Strategy]) -> Choices:
    """Return choices that cost nothing."""
    return Choices(options, *(np.zeros(len(options)) for _ in range(3)))


def leaf_layouts(shape, mesh: Mesh, parts: dict[int, frozenset[int]], orders: bool) -> list[Layout]:
    """Return all legal layouts without Partial: per axis a dim or none; `orders` also permutes axes that share a dim (a
    ZeRO-sharded column-parallel weight is cut by tp first); `parts` adds layouts inside the parts of a dim."""
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
                    if len(dims[d]) == 1 and p > 1 or dims[d] and p == ZIGZAG and in_mesh_order:
                        inside = replace(layout, parts=tuple(p if e == d else 1 for e in range(len(shape))))
                        if is_legal(shape, inside, mesh):
                            result[inside] = None
    return list(result)


def _cast_seconds(v: Vertex, strategy: Strategy, mesh: Mesh, cost: ComputeCost) -> float:
    """Return the seconds of the casts that belong to an op: those of gradients to the type of their parameter."""
    made, total = values_of(v.node), 0.0
    for output, cast in v.casts.items():
        bytes_ = bytes_of(made[output]) + bytes_of(cast.meta["val"])
        total += cost.copy_seconds(bytes_ * fraction(strategy.outputs[output], mesh))
    return total


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
        if node.target not in (*PASS_PARTIAL, *WAYS, *OF_KEPT_KEYS) and not is_foreign(node) and not has_rows(node):
            rule = replace(rule, linear=())
        parts = rules.factor_parts(node, rule, part_sets)
        options = rules.strategies(rule, [a.shape for a in arguments], [o.shape for o in outputs], mesh, parts)
    if cost.expert_capacity is not None:  # what is further rounds of rows is not known of tokens
        options = [option for option in options if not goes_once(node, option.choice)]
    fuses = cost.fuses
    fused = [fuses and is_fused for is_fused in fused_inputs(node)]
    is_fused_away = (
        fuses
        and len(node.users) == 1
        and any(
            user
            for user in node.users
            if any(f and a is node for f, a in zip(fused_inputs(user), tensor_arguments(user)))
        )
    )
    seconds = []
    for option in options:
        traffic = 0.0
        for value, layout, skip in zip(arguments, option.inputs, fused):
            traffic += 0.0 if skip else bytes_of(value) * fraction(layout, mesh)
        if not is_fused_away:
            traffic += sum(bytes_of(value) * fraction(layout, mesh) for value, layout in zip(outputs, option.outputs))
        price = cost.seconds(node, option, mesh, traffic) if moves_rows(node, option) else 0.0
        load, sent = (of(node, option, mesh, cost.skew) for of in (load_of, sent_load_of))
        busiest = load * (price + exchange_seconds(node, option, mesh, cost.hardware))
        if sent != load:  # rows of hot experts are on no link
            busiest -= (load - sent) * link_seconds(node, option, mesh, cost.hardware)
        seconds.append(busiest + (cost.copies.seconds(node, option, mesh) if cost.copies else 0.0))
    if rule is not None and rule.apart:
        options, seconds = _cheapest(options, seconds)
    choices = _free(options)
    choices.seconds = np.array(seconds)
    return choices


def _cheapest(options: list[Strategy], seconds: list[float]) -> tuple[list[Strategy], list[float]]:
    """Return one strategy for any layouts, the cheapest: others of the same layouts are never better."""
    best: dict[tuple[object, ...], tuple[Strategy, float]] = {}
    for option, price in zip(options, seconds):
        layouts = option.inputs, option.outputs
        if layouts not in best or price < best[layouts][1]:
            best[layouts] = option, price
    return [option for option, _ in best.values()], [price for _, price in best.values()]
