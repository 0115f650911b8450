"""Place every op of a joint graph on a stage of a pipeline, by data flow.

Forward ops belong to the stage in whose range of the graph's order they stand. What follows from inputs alone, or from
parameters alone (a cast or view of one that trains), is no activation: each stage that reads it computes it (`free`).
Another value computed from parameters alone is made where it is first read. A backward op runs where the values that it
reads are: the gradients that it is given come down from later stages, the forward's values are where they were made or
read, or are sent where a cut leaves no other way. Of the stages that could run it, it takes the one that sends less.

A parameter that several stages read (tied embeddings) is on all of them. Ops that only add up its gradient over its
uses (`terms`) belong to none: each stage computes its own part of the sum.

Sets of stages are bits of an integer: stage s is in `mask` if mask >> s & 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from ..errors import StageError
from .graph import bytes_of, describe, is_op, is_tensor, output_node, outputs_of, tensor_of, values_of

aten = torch.ops.aten
LINEAR_UNARY = {
    aten._to_copy.default, aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.t.default,
    aten.transpose.int, aten.permute.default, aten.alias.default, aten.clone.default,
}  # fmt: skip


class StagePlacement:
    """`stage`: of every activation and gradient. `read_at`: the stages that read each value. `parameters`: the stages
    of each parameter's placeholder. `terms`: op -> parameter, see above. `owner`: of gradients, the stage
    that adds them to its parameter's. `like`: of the same graph with other cuts, if there is one. Raises StageError for
    names that are no forward ops in order."""

    def __init__(self, graph: fx.Graph, cuts: Sequence[str], like: StagePlacement | None = None):
        self.graph, self.count, self.all = graph, len(cuts) + 1, (1 << len(cuts) + 1) - 1
        self.output = output_node(graph)
        self.of_parameters: list[fx.Node] = [] if like is None else like.of_parameters
        if like is None:
            self.pairs = outputs_of(graph)
            self.nodes = [n for n in graph.nodes if n.op != "output"]
            self.inputs = {n: n.all_input_nodes for n in self.nodes}
            self.roots = self._roots()
        else:
            self.pairs, self.nodes, self.inputs, self.roots = like.pairs, like.nodes, like.inputs, like.roots
        self.free = set(self.roots)
        self.stage: dict[fx.Node, int] = {}
        self._forward(cuts)
        self._reads()
        self.leaves = {n.meta["role"].name: n for n in self.parameters}
        self.parameter_stages: dict[fx.Node, int] = {}
        for value, role in self.pairs:
            if role.kind == "gradient":
                self.parameter_stages[value] = (
                    self.parameter_stages.get(value, 0) | self.parameters[self.leaves[role.name]]
                )
        self.terms = self._sums()
        self._backward()
        self._sink()
        self._reads()
        self.owner = self._owners()
        for value, stage in self.owner.items():
            self.read_at[value] = self.read_at.get(value, 0) | 1 << stage

    def _roots(self) -> dict[fx.Node, frozenset[fx.Node]]:
        """Map what follows from inputs alone or from parameters alone to the leaves that it follows from."""
        changed = {role.name for _, role in self.pairs if role.kind == "mutation"}
        kinds: dict[fx.Node, frozenset[str]] = {}
        roots: dict[fx.Node, frozenset[fx.Node]] = {}
        for node in self.nodes:
            if node.op == "placeholder":
                role = node.meta["role"]
                differs = role.kind == "parameter" or role.kind == "buffer" and role.name in changed
                kinds[node] = frozenset(["tangent" if role.is_tangent else role.kind if differs else "input"])
            else:
                kinds[node] = frozenset().union(*(kinds[a] for a in self.inputs[node]))
            if len(kinds[node]) <= 1 and "tangent" not in kinds[node] and all(a in roots for a in self.inputs[node]):
                above = frozenset().union(*(roots[a] for a in self.inputs[node]))
                trains = any(r.meta["role"].trainable for r in above)
                if node.op == "placeholder" or not trains or node.target in LINEAR_UNARY:
                    roots[node] = above | ({node} if node.op == "placeholder" else set())
        self.of_parameters = [n for n in self.nodes if n not in roots and kinds[n] == {"parameter"}]
        return roots

    def _forward(self, cuts: Sequence[str]) -> None:
        order = [n.name for n in self.nodes if is_op(n) and n.meta["phase"] == "forward"]
        position = {name: i for i, name in enumerate(order)}
        starts = [position.get(name, -1) for name in cuts]
        if -1 in starts or starts != sorted(set(starts)):
            wrong = [name for name in cuts if name not in position] or cuts
            raise StageError(
                f"stages cannot begin at {', '.join(wrong)}", fix="name forward ops of the graph, in its order"
            )
        begins, stage = set(cuts), 0
        for node in self.nodes:
            if node.op == "call_function" and node.meta["phase"] == "forward":
                stage += node.name in begins
                if node not in self.free:
                    producer = tensor_of(node)[0]
                    self.stage[node] = stage if producer is node else self.stage[producer]
        for node in reversed(self.of_parameters):  # a weight that is computed, where it is first read
            if node in self.stage:
                self.stage[node] = min((self.stage[u] for u in node.users if u in self.stage), default=self.stage[node])
        for node in self.of_parameters:
            if node in self.stage:
                self.stage[node] = self.stage[tensor_of(node)[0]]
        for value, role in self.pairs:
            if role.kind == "joined" and value in self.stage:  # read where the tail of the step is
                self.stage[value] = self.count - 1

    def _reads(self) -> None:
        """Find which stages read each value, and each parameter, through what is computed wherever it is read."""
        self.read_at: dict[fx.Node, int] = {}
        reads = [(argument, stage) for node, stage in self.stage.items() for argument in self.inputs[node]]
        reads += [(v, self.count - 1) for v, r in self.pairs if v in self.free and r.is_forward]
        for value, stage in reads:
            for read in self.roots.get(value, (value,)):
                self.read_at[read] = self.read_at.get(read, 0) | 1 << stage
        self.parameters = {
            n: self.read_at.get(n, 0)
            for n in self.nodes
            if n.op == "placeholder" and n.meta["role"].kind == "parameter"
        }

    def _sums(self) -> dict[fx.Node, fx.Node]:
        terms: dict[fx.Node, fx.Node] = {}
        for value, role in self.pairs:
            if role.kind != "gradient":
                continue
            leaf = self.leaves[role.name]
            stack = [value] if self.parameters[leaf].bit_count() > 1 else []
            while stack:
                node = stack.pop()
                if is_sum(node) and not set(node.users) - {self.output} - set(terms):
                    terms[node] = leaf
                    stack.extend(a for a in self.inputs[node] if is_op(a))
        return terms

    def _owners(self) -> dict[fx.Node, int]:
        """Return the stage that each gradient, or part of one, goes to: the latest with its parameter, not after where
        it is made."""
        owner: dict[fx.Node, int] = {}
        for value, role in self.pairs:
            stages, stack = self.parameter_stages.get(value, 0), [value] if role.kind == "gradient" else []
            while stack:
                node = stack.pop()
                if node in self.terms:
                    stack.extend(self.inputs[node])
                elif node in self.stage:
                    owner[node] = (stages & (2 << self.stage[node]) - 1).bit_length() - 1
        return owner

    def available(self, node: fx.Node) -> int:
        """Return the stages that can read a value in the backward without anything else being sent."""
        stages = self.reachable(node)
        if node in self.stage and node.meta["phase"] == "forward":
            stages &= 1 << self.stage[node] | self.read_at.get(node, 0)
        return stages

    def reachable(self, node: fx.Node) -> int:
        """Return the stages that a value can be sent to: gradients go to earlier ones only, a parameter stays where the
        forward reads it, cotangents are where the tail of the step is."""
        if node in self.stage and node.meta["phase"] != "forward":
            return (1 << self.stage[node] + 1) - 1
        stages = self.all
        if node.op == "placeholder" and node.meta["role"].kind == "cotangent":  # made behind the last forward
            return 1 << self.count - 1
        for root in self.roots.get(node, ()):
            stages &= self.parameters.get(root, self.all)
        return stages

    def _floors(self) -> dict[fx.Node, int]:
        """Return the earliest stage that can run each op of the backward: gradients of later parameters follow from
        it."""
        floors: dict[fx.Node, int] = {}
        for node in reversed(self.nodes):
            if node.op == "call_function" and node not in self.stage and node not in self.free:
                floor = max((floors[u] for u in node.users if u in floors), default=0)
                stages = self.parameter_stages.get(node, self.all)
                for argument in self.inputs[node]:
                    stages &= self.reachable(argument) if argument in self.free else self.all
                floors[node] = first_of(stages >> floor << floor, floor)
        return floors

    def _backward(self) -> None:
        """Place each op of the backward on the last stage that could run it, if possible without sending more of the
        forward's values."""
        floors = self._floors()
        for node in self.nodes:
            if node not in floors or node in self.terms:
                continue
            near = far = self.all >> floors[node] << floors[node]
            for argument in self.inputs[node]:
                near &= self.available(argument)
                far &= self.reachable(argument)
            if not far:
                source = node.meta.get("source") or None
                raise StageError(f"no stage has all that {node.name} reads", node=describe(node), source=source)
            self.stage[node] = (near or far).bit_length() - 1

    def _sink(self) -> None:
        """Move ops of the backward whose results are read in earlier stages only to those, unless they are given more
        than they make."""
        for node in reversed(self.nodes):
            if node in self.stage and node.meta["phase"] != "forward" and is_op(node):
                items = [u for u in node.users if tensor_of(u)[0] is node and u is not node]
                wanted = self._wanted(node, items)
                if wanted < self.stage[node] and self._carried(node, wanted) <= sum(map(bytes_of, values_of(node))):
                    self.stage |= dict.fromkeys([node, *(i for i in items if i in self.stage)], wanted)

    def _wanted(self, node: fx.Node, items: Sequence[fx.Node]) -> int:
        """Return the latest stage that reads an op's results, if the op could run there, else its own."""
        here, wanted = self.stage[node], -1
        for result in (node, *items):
            masks = [self.parameters[self.terms[u]] for u in result.users if u in self.terms]
            for mask in (*masks, *([self.parameter_stages[result]] if result in self.parameter_stages else ())):
                wanted = max(wanted, (mask & (2 << here) - 1).bit_length() - 1)
            wanted = max([wanted, *(self.stage[u] for u in result.users if u in self.stage and u not in items)])
        possible = wanted >= 0 and all(self.available(a) >> wanted & 1 for a in self.inputs[node])
        return wanted if possible else here

    def _carried(self, node: fx.Node, target: int) -> int:
        """Return the bytes that come down to a stage for an op that runs there, and would not otherwise."""
        given = [a for a in self.inputs[node] if a in self.stage and a.meta["phase"] != "forward"]
        return sum(
            bytes_of(v)
            for a in given
            for v in values_of(a)
            if not any(self.stage.get(u, target + 1) <= target for u in a.users if u is not node)
        )


def is_sum(node: fx.Node) -> bool:
    """Return whether the op is linear in all of its tensors together: a sum of two, or a view or cast of one."""
    if node.target is aten.add.Tensor:
        return not node.kwargs and all(
            is_tensor(a) and a.meta["val"].shape == node.meta["val"].shape for a in node.args
        )
    return node.target in LINEAR_UNARY and node.meta["val"].is_floating_point()


def first_of(mask: int, default: int) -> int:
    """Return the first stage of a set, `default` if it is empty."""
    return (mask & -mask).bit_length() - 1 if mask else default
