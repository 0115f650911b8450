"""Cut a joint graph into the stages of a pipeline: one joint graph each, with the tensors that pass between them.

Forward ops belong to the stage in whose range of the graph's order they stand. What follows from inputs alone, or from parameters
alone, is no activation: each stage that reads it computes it. A backward op runs where the values that it reads are: the gradients it
is given came down from later stages, the forward's values are where they were made or read (or are sent, where a cut leaves no other
way). Of the stages that could run it, it takes the one that sends less. Values that skip stages are handed on by those between.

A parameter that several stages read (tied embeddings) is on all of them. Its gradient is a sum over its uses: each stage computes its
own part, and the parts are added up over the stages once a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from .._torch import graph_module
from ..errors import StageError
from ..graph import OutputRole, Role, bytes_of, describe, is_op, is_tensor, output_node, tensor_of, values_of
from ..layout import Layout
from ..sharding import Sharding

aten = torch.ops.aten
LINEAR_UNARY = {
    aten._to_copy.default, aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.t.default, aten.transpose.int,
    aten.permute.default, aten.alias.default, aten.clone.default,
}  # fmt: skip

Tensor = tuple[str, int, int, int]  # the op that makes it, which item of its value, which of its tensors, number of dims


@dataclass(frozen=True)
class Stage:
    """One stage's joint graph. received, sent: names of the activations that come from the stage before and go to the next one;
    gradients of `received` go back and those of `sent` arrive, as far as there are any (`returned`, `arriving`, by the same names
    or those of the backward's own values). parameters: names."""

    index: int
    joint: fx.GraphModule
    parameters: tuple[str, ...]
    received: tuple[str, ...]
    sent: tuple[str, ...]
    arriving: tuple[str, ...]
    returned: tuple[str, ...]
    tensors: Mapping[str, Tensor]  # which output of which op, by the name of what passes between stages
    outputs: tuple[int | str, ...]  # what each output of the graph is: the position of one of the whole graph's, or a name

    def sharding(self, whole: Sharding) -> Sharding:
        """The decisions for this stage's graph, of those for the whole one."""
        graph = self.joint.graph
        names = {n.name for n in graph.nodes}
        leaves = {n.name: whole.leaves[n.name] for n in graph.nodes if n.op in ("placeholder", "get_attr") and n.name in whole.leaves}
        leaves |= {name: self._layout(name, whole) for name in (*self.received, *self.arriving)}
        copies = {(producer, item): name for name, (producer, item, _, _) in self.tensors.items() if name in self.received}
        kept = {(copies[k[:2]], 0, k[2]) if k[:2] in copies else k for k in whole.kept}
        return replace(
            whole, nodes={name: s for name, s in whole.nodes.items() if name in names}, leaves=leaves,
            outputs=tuple(whole.outputs[o] if isinstance(o, int) else self._layout(o, whole) for o in self.outputs),
            kept=frozenset(k for k in kept if k[0] in names), again=whole.again & names, on_host=whole.on_host & names,
        )  # fmt: skip

    def _layout(self, name: str, whole: Sharding) -> Layout:
        """In which the op that makes a tensor gives it."""
        producer, _, position, ndim = self.tensors[name]
        return whole.nodes[producer].outputs[position] if producer in whole.nodes else Layout.replicated(ndim)


def cut(joint: fx.GraphModule, cuts: Sequence[str]) -> list[Stage]:
    """Stages that begin at the forward ops `cuts`, and before the first of them. Raises StageError for names that are no forward ops
    of the graph, in its order."""
    places = _Places(joint.graph, cuts)
    return [_Builder(joint, places, index).stage() for index in range(len(cuts) + 1)]


class _Places:
    """Where everything is. `stage` of activations and gradients; `read_at`: the stages that read each of them; `parameters`: the
    stages of each; `terms`: nodes that only sum up one parameter's gradient over its uses."""

    def __init__(self, graph: fx.Graph, cuts: Sequence[str]):
        self.graph, self.count = graph, len(cuts) + 1
        self.output = output_node(graph)
        self.pairs = [(v, r) for v, r in zip(self.output.args[0], self.output.meta["roles"])]
        self.position = {n: i for i, n in enumerate(graph.nodes)}
        self._free()
        self.stage: dict[fx.Node, int] = {}
        self._forward(cuts)
        self.read_at: dict[fx.Node, set[int]] = {}
        self._reads()
        self.terms = self._sums()
        self._backward()
        self._sink()
        self._reads()

    def _free(self) -> None:
        """What follows from inputs alone or from parameters alone."""
        self.free: set[fx.Node] = set()
        kinds: dict[fx.Node, frozenset[str]] = {}
        changed = {role.name for _, role in self.pairs if role is not None and role.kind == "mutation"}
        for node in self.graph.nodes:
            if node.op == "placeholder":
                role = node.meta["role"]
                known = role.kind in ("parameter", "tangent") or role.kind == "buffer" and role.name in changed
                kinds[node] = frozenset([role.kind if known else "input"])
            else:
                kinds[node] = frozenset().union(*(kinds[a] for a in node.all_input_nodes))
            if len(kinds[node]) <= 1 and "tangent" not in kinds[node] and node.op != "output":
                self.free.add(node)

    def _forward(self, cuts: Sequence[str]) -> None:
        names = {n.name: i for n, i in self.position.items() if is_op(n) and n.meta["phase"] == "forward"}
        unknown = [name for name in cuts if name not in names]
        starts = [names.get(name, -1) for name in cuts]
        if unknown or starts != sorted(set(starts)):
            raise StageError(
                f"stages cannot begin at {', '.join(unknown or cuts)}", fix="name forward ops of the graph, in its order (autopar graph)"
            )
        for node in self.graph.nodes:
            if node not in self.free and node.meta.get("phase") == "forward" and node.op == "call_function":
                producer = tensor_of(node)[0]
                self.stage[node] = sum(start <= self.position[producer] for start in starts)

    def roots(self, node: fx.Node) -> set[fx.Node]:
        """The node itself, or if it is computed wherever it is read: the leaves that it is computed from."""
        if node not in self.free:
            return {node}
        found, stack = set(), [node]
        while stack:
            n = stack.pop()
            if n.op in ("placeholder", "get_attr"):
                found.add(n)
            stack.extend(n.all_input_nodes)
        return found

    def _reads(self) -> None:
        """Which stages read each value, and each leaf."""
        self.read_at = {}
        for node, stage in self.stage.items():
            for argument in node.all_input_nodes:
                for root in self.roots(argument):
                    self.read_at.setdefault(root, set()).add(stage)
        self.parameters = {n: self.read_at.get(n, set()) for n in self.graph.nodes
                           if n.op == "placeholder" and n.meta["role"].kind == "parameter"}  # fmt: skip

    def _sums(self) -> dict[fx.Node, fx.Node]:
        """Nodes that only add up (or view, or cast) the gradient of a parameter that several stages read -> the parameter."""
        self.leaves = leaves = {n.meta["role"].name: n for n in self.parameters}
        terms: dict[fx.Node, fx.Node] = {}
        for value, role in self.pairs:
            if role is None or role.kind != "gradient" or len(self.parameters[leaves[role.name]]) < 2:
                continue
            stack = [value]
            while stack:
                node = stack.pop()
                users = set(node.users) - {self.output} - set(terms)
                if is_sum(node) and not users:
                    terms[node] = leaves[role.name]
                    stack.extend(a for a in node.all_input_nodes if is_op(a))
        return terms

    def available(self, node: fx.Node) -> set[int]:
        """Stages that can read a value in the backward without anything else being sent."""
        stages = self.reachable(node)
        if node in self.stage and node.meta["phase"] == "forward":
            stages &= {self.stage[node]} | self.read_at.get(node, set())
        return stages

    def reachable(self, node: fx.Node) -> set[int]:
        """Stages that a value can be sent to: gradients go to earlier ones only, and a parameter stays where the forward reads it."""
        stages = set(range(self.count))
        if node in self.stage and node.meta["phase"] != "forward":
            stages = set(range(self.stage[node] + 1))
        for root in self.roots(node) if node in self.free else ():
            stages &= self.parameters.get(root, stages)
        return stages

    def _floors(self) -> dict[fx.Node, int]:
        """The earliest stage that can run each op of the backward: gradients of later parameters follow from it."""
        floors: dict[fx.Node, int] = {}
        homes = {value: self.parameters[self.leaves[r.name]] for value, r in self.pairs if r is not None and r.kind == "gradient"}
        for node in reversed(self.graph.nodes):
            if node.op == "call_function" and node not in self.stage and node not in self.free:
                floor = max((floors[u] for u in node.users if u in floors), default=0)
                owners = [self.reachable(a) for a in node.all_input_nodes if a in self.free]
                owners += [homes[node]] if node in homes else []
                floors[node] = min((s for s in range(floor, self.count) if all(s in stages for stages in owners)), default=floor)
        return floors

    def _backward(self) -> None:
        """The last stage that could run each op of the backward, if possible without sending more of the forward's values."""
        floors = self._floors()
        for node in self.graph.nodes:
            if node in floors and node not in self.terms:
                inputs, late = node.all_input_nodes, set(range(floors[node], self.count))
                stages = set.intersection(late, *map(self.available, inputs)) or set.intersection(late, *map(self.reachable, inputs))
                if not stages:
                    raise StageError(
                        f"no stage has all that {node.name} reads", node=describe(node), source=node.meta.get("source") or None
                    )
                self.stage[node] = max(stages)

    def _sink(self) -> None:
        """Ops of the backward whose result is read in earlier stages only go there, unless they are given less than they make."""
        homes = {}
        for value, role in self.pairs:
            if role is not None and role.kind == "gradient":
                homes.setdefault(value, set()).update(self.parameters[self.leaves[role.name]])
        for node in reversed(self.graph.nodes):
            if node in self.stage and node.meta["phase"] != "forward" and is_op(node):
                wanted, here = self._wanted(node, homes), self.stage[node]
                if wanted is not None and wanted < here and self._carried(node, wanted) <= sum(map(bytes_of, values_of(node))):
                    for item in (node, *(u for u in node.users if u in self.stage and tensor_of(u)[0] is node)):
                        self.stage[item] = wanted

    def _wanted(self, node: fx.Node, homes: Mapping[fx.Node, set[int]]) -> int | None:
        """The latest stage that reads an op's results, if the op could run there."""
        here, results = self.stage[node], [node, *(u for u in node.users if tensor_of(u)[0] is node and u is not node)]
        wanted = set()
        for result in results:
            stages = [self.parameters[self.terms[u]] for u in result.users if u in self.terms]
            for owners in (*stages, *([homes[result]] if result in homes else ())):
                wanted.add(max((s for s in owners if s <= here), default=here))
            wanted |= {self.stage[u] for u in result.users if u in self.stage and u not in results}
        target = max(wanted, default=here)
        return target if all(target in self.available(a) for a in node.all_input_nodes) else None

    def _carried(self, node: fx.Node, target: int) -> int:
        """Bytes that come down to a stage for an op that runs there, and would not otherwise."""
        given = [a for a in node.all_input_nodes if a in self.stage and a.meta["phase"] != "forward"]
        return sum(
            bytes_of(v) for a in given for v in values_of(a)
            if not any(self.stage.get(u, target + 1) <= target for u in a.users if u is not node)
        )  # fmt: skip


def is_sum(node: fx.Node) -> bool:
    """Whether the op is linear in each of its arguments alone: a sum of two tensors, or a view or cast of one."""
    if node.target is aten.add.Tensor:
        return not node.kwargs and all(is_tensor(a) and a.meta["val"].shape == node.meta["val"].shape for a in node.args)
    return node.target in LINEAR_UNARY


class _Builder:
    """Builds the graph of one stage."""

    def __init__(self, joint: fx.GraphModule, places: _Places, index: int):
        self.joint, self.places, self.index = joint, places, index
        self.graph, self.new = fx.Graph(), {}

    def stage(self) -> Stage:
        places, s = self.places, self.index
        last = {n: max(stages) for n, stages in places.read_at.items()}
        first = {n: min(stages) for n, stages in places.read_at.items()}
        values = [n for n in places.graph.nodes if n in places.stage and is_tensor(n)]
        received = [n for n in values if places.stage[n] < s <= last.get(n, 0)]
        sent = [n for n in values if places.stage[n] <= s < last.get(n, 0)]
        arriving = [n for n in values if places.stage[n] > s >= first.get(n, s + 1)]
        returned = [n for n in values if places.stage[n] >= s > first.get(n, s)]
        outputs = self._outputs()
        needed = [v for v, _ in outputs] + sent + returned
        own = self._own(needed, {*received, *arriving})
        leaves = [n for n in places.graph.nodes if n in own and n.op == "placeholder"]
        for node in [n for n in leaves if n.meta["role"].kind != "tangent"]:
            self.new[node] = self.graph.node_copy(node)
        for node in received:
            self._placeholder(node, Role("activation", node.name), "forward")
        for node in arriving:
            self._placeholder(node, Role("arriving", node.name), "backward")
        for node in [n for n in leaves if n.meta["role"].kind == "tangent"]:
            self.new[node] = self.graph.node_copy(node)
        for node in places.graph.nodes:
            if node in own and node not in self.new and node.op != "output" and node not in places.terms:
                self.new[node] = self.graph.node_copy(node, self.new.__getitem__)
        pairs = [(self.new[v], r) for v, r in outputs if r.kind in ("output", "mutation")]
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
        position = {role: i for i, (_, role) in enumerate(places.pairs)}
        return Stage(s, module, names, *passing, tensors, tuple(position.get(r, r.name) for _, r in pairs))

    def _placeholder(self, node: fx.Node, role: Role, phase: str) -> None:
        self.new[node] = self.graph.create_node("placeholder", node.name, (), {}, node.name)
        self.new[node].meta = {**node.meta, "role": role, "phase": phase}

    def _outputs(self) -> list[tuple[fx.Node, OutputRole]]:
        """Outputs of the whole graph that this stage gives."""
        found = []
        for value, role in self.places.pairs:
            if not isinstance(value, fx.Node) or role is None:
                continue
            if role.kind == "gradient":
                if self._has_term(value):
                    found.append((value, role))
            elif self.places.stage.get(value, self.places.count - 1) == self.index:
                found.append((value, role))
        return found

    def _has_term(self, value: fx.Node) -> bool:
        if value in self.places.terms:
            return any(self._has_term(a) for a in value.all_input_nodes)
        return self.places.stage.get(value) == self.index

    def _term(self, value: fx.Node) -> fx.Node:
        """This stage's part of a gradient that is summed over several: the same sum without what other stages add."""
        if value not in self.places.terms or value in self.new:
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
        """All nodes that the stage computes or reads for `needed`."""
        own, stack = set(), list(needed)
        while stack:
            node = stack.pop()
            if node in own or node in given:
                continue
            own.add(node)
            stack.extend(a for a in node.all_input_nodes if node not in self.places.terms or self._has_term(a))
        return own


def _tensor(node: fx.Node) -> Tensor:
    producer, item = tensor_of(node)
    values = producer.meta["val"]
    position = 0 if isinstance(values, torch.Tensor) else sum(isinstance(v, torch.Tensor) for v in values[:item])
    return producer.name, item, position, node.meta["val"].dim()
