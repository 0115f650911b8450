"""Cut a joint graph into the stages of a pipeline: one joint graph each, with the tensors that pass between them.

autopar/ir/stage_placement.py says which op belongs to which stage. A value that a later stage reads goes there with the
forward, one that an earlier stage reads comes down with the backward, and stages in between hand it on. The gradient of
a parameter on several stages is a sum over its uses: each stage computes its own part, and the parts are added up over
the stages once a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from ..._torch import graph_module
from ...ir.graph import OutputRole, Role, is_tensor, tensor_of
from ...ir.layout import Layout
from ...ir.stage_placement import StagePlacement, first_of
from ...plans.plan import Plan
from ...plans.sharding import Sharding

aten = torch.ops.aten

Tensor = tuple[
    str, int, int, int
]  # the op that makes it, which item of its value, which of its tensors, number of dims


@dataclass(frozen=True)
class Stage:
    """One stage's joint graph. received, sent: names of the activations that come from the stage before and go to the
    next one; gradients of `received` go back and those of `sent` arrive, as far as there are any (`returned`,
    `arriving`, by the same names or those of the backward's own values). parameters: names."""

    index: int
    joint: fx.GraphModule
    parameters: tuple[str, ...]
    received: tuple[str, ...]
    sent: tuple[str, ...]
    arriving: tuple[str, ...]
    returned: tuple[str, ...]
    tensors: Mapping[str, Tensor]  # which output of which op, by the name of what passes between stages
    outputs: tuple[
        int | str, ...
    ]  # what each output of the graph is: the position of one of the whole graph's, or a name

    @property
    def leaves(self) -> frozenset[str]:
        """Return the names of the parameters and buffers that the stage reads."""
        roles = (n.meta["role"] for n in self.joint.graph.nodes if n.op == "placeholder")
        return frozenset(role.name for role in roles if role.kind in ("parameter", "buffer"))

    def sharding(self, whole: Sharding) -> Sharding:
        """Return the decisions for this stage's graph, taken from those for the whole one."""
        names = {n.name for n in self.joint.graph.nodes}
        leaves = {name: layout for name, layout in whole.leaves.items() if name in names}
        leaves |= {name: self._layout(name, whole) for name in (*self.received, *self.arriving)}
        copies = {
            (producer, item): name for name, (producer, item, _, _) in self.tensors.items() if name in self.received
        }
        kept = {(copies[k[:2]], 0, k[2]) if k[:2] in copies else k for k in whole.kept}
        return replace(
            whole,
            nodes={name: s for name, s in whole.nodes.items() if name in names},
            leaves=leaves,
            outputs=tuple(whole.outputs[o] if isinstance(o, int) else self._layout(o, whole) for o in self.outputs),
            kept=frozenset(k for k in kept if k[0] in names),
            recomputed=whole.recomputed & names,
            on_host=whole.on_host & names,
        )

    def plan(self, whole: Plan) -> Plan:
        """Return the plan of this stage's graph on its own devices, taken from that of all stages."""
        names = {n.name for n in self.joint.graph.nodes if n.op == "call_function"}
        saved = whole.saved_on_host
        values = tuple(value for value in saved.values if value[0] in names) if saved is not None else ()
        return replace(
            whole,
            mesh=whole.sharding.mesh,
            sharding=self.sharding(whole.sharding),
            saved_on_host=replace(saved, values=values) if saved is not None and values else None,
        )

    def _layout(self, name: str, whole: Sharding) -> Layout:
        """Return the layout in which the op that makes a tensor gives it."""
        producer, _, position, ndim = self.tensors[name]
        return whole.nodes[producer].outputs[position] if producer in whole.nodes else Layout.replicated(ndim)


def cut(joint: fx.GraphModule, cuts: Sequence[str]) -> list[Stage]:
    """Cut a joint graph into stages: one begins at each of the forward ops `cuts`, one before the first of them. Raises
    StageError for names that are no forward ops of the graph, in its order."""
    placement = StagePlacement(joint.graph, cuts)
    return [_Builder(joint, placement, index).stage() for index in range(len(cuts) + 1)]


class _Builder:
    """Builds the graph of one stage."""

    def __init__(self, joint: fx.GraphModule, placement: StagePlacement, index: int):
        self.joint, self.placement, self.index = joint, placement, index
        self.graph = fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}

    def stage(self) -> Stage:
        """Build the stage: its joint graph and the names of what it receives, sends and returns."""
        placement, s = self.placement, self.index
        last = {n: mask.bit_length() - 1 for n, mask in placement.read_at.items()}
        first = {n: first_of(mask, s) for n, mask in placement.read_at.items()}
        values = [n for n in placement.graph.nodes if n in placement.stage and is_tensor(n)]
        received = [n for n in values if placement.stage[n] < s <= last.get(n, 0)]
        sent = [n for n in values if placement.stage[n] <= s < last.get(n, 0)]
        arriving = [n for n in values if placement.stage[n] > s >= first.get(n, s + 1)]
        returned = [n for n in values if placement.stage[n] >= s > first.get(n, s)]
        outputs = self._outputs()
        needed = [v for v, _ in outputs] + sent + returned
        own = self._own(needed, {*received, *arriving})
        leaves = [n for n in placement.graph.nodes if n in own and n.op == "placeholder"]
        for node in [n for n in leaves if not n.meta["role"].is_tangent]:
            self.new[node] = self.graph.node_copy(node)
        for node in received:
            self._placeholder(node, Role("activation", node.name), "forward")
        for node in arriving:
            self._placeholder(node, Role("arriving", node.name), "backward")
        for node in [n for n in leaves if n.meta["role"].is_tangent]:
            self.new[node] = self.graph.node_copy(node)
        for node in placement.graph.nodes:
            if node in own and node not in self.new and node.op != "output" and node not in placement.terms:
                self.new[node] = self.graph.node_copy(node, self.new.__getitem__)
        pairs = [(self.new[v], r) for v, r in outputs if r.kind in ("output", "mutation", "joined")]
        pairs += [(self.new[n], OutputRole("activation", n.name)) for n in sent]
        pairs += [(self._term(v), r) for v, r in outputs if r.kind == "gradient"]
        pairs += [(self.new[n], OutputRole("returned", n.name)) for n in returned]
        output = self.graph.output(tuple(v for v, _ in pairs))
        output.meta["roles"] = [r for _, r in pairs]
        self.graph.lint()
        module = graph_module(self.joint, self.graph, f"Stage{s}")
        names = tuple(n.meta["role"].name for n in leaves if n.meta["role"].kind == "parameter")
        passing = [tuple(n.name for n in v) for v in (received, sent, arriving, returned)]
        tensors = {n.name: _tensor(n) for n in (*received, *sent, *arriving, *returned)}
        position = {role: i for i, (_, role) in enumerate(placement.pairs)}
        return Stage(s, module, names, *passing, tensors, tuple(position.get(r, r.name) for _, r in pairs))

    def _placeholder(self, node: fx.Node, role: Role, phase: str) -> None:
        self.new[node] = self.graph.create_node("placeholder", node.name, (), {}, node.name)
        self.new[node].meta = {**node.meta, "role": role, "phase": phase}

    def _outputs(self) -> list[tuple[fx.Node, OutputRole]]:
        """Return the outputs of the whole graph that this stage gives."""
        found = []
        for value, role in self.placement.pairs:
            if role.kind == "gradient":
                if self._has_term(value):
                    found.append((value, role))
            elif self.placement.stage.get(value, self.placement.count - 1) == self.index:
                found.append((value, role))
        return found

    def _has_term(self, value: fx.Node) -> bool:
        if value in self.placement.terms:
            return any(self._has_term(a) for a in value.all_input_nodes)
        return self.placement.owner.get(value) == self.index

    def _term(self, value: fx.Node) -> fx.Node:
        """Return this stage's part of a gradient that is summed over several: the same sum without what other stages
        add."""
        if value not in self.placement.terms or value in self.new:
            return self.new[value]
        mine = [a for a in value.all_input_nodes if self._has_term(a)]
        for argument in mine:
            self.new.setdefault(argument, self._term(argument))
        if value.target is aten.add.Tensor and len(mine) < len(set(value.all_input_nodes)):
            self.new[value] = self.new[mine[0]]
        else:
            self.new[value] = self.graph.node_copy(value, self.new.__getitem__)
        return self.new[value]

    def _own(self, needed: Sequence[fx.Node], given: set[fx.Node]) -> set[fx.Node]:
        """Return all nodes that the stage computes or reads for `needed`."""
        own, stack = set(), list(needed)
        while stack:
            node = stack.pop()
            if node in own or node in given:
                continue
            own.add(node)
            stack.extend(a for a in node.all_input_nodes if node not in self.placement.terms or self._has_term(a))
        return own


def _tensor(node: fx.Node) -> Tensor:
    producer, item = tensor_of(node)
    values = producer.meta["val"]
    position = 0 if isinstance(values, torch.Tensor) else sum(isinstance(v, torch.Tensor) for v in values[:item])
    return producer.name, item, position, node.meta["val"].dim()
