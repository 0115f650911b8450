"""Find the dims of a joint graph's tensors that are the samples of the batch: the graph's sharding over an axis of
micro-batches.

A micro-batch is a shard of the batch over time instead of over devices, so the factor rules say what becomes of it: the
factor that the samples are in an op's input are samples in all its tensors, and where it is summed away the
micro-batches' results add up. From the inputs this spreads through the graph in both directions, which reaches tensors
that are made for the batch (a mask of ones).

What one micro-batch computes must not need another one: sums over the batch are the end of a gradient or an output, or
they follow from the inputs alone (how many tokens count) and are known before the first micro-batch starts. Anything
else is refused here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from ...errors import MicroBatchError
from ...ir.graph import (
    OutputRole,
    describe,
    is_op,
    is_tensor,
    operand,
    output_node,
    outputs_of,
    tensor_arguments,
    tensor_of,
    values_of,
)
from ...ir.layout import Layout
from ...ir.mesh import Mesh
from ...plans.sharding import NodeSharding
from ...rules import Rule, Strategy, rule_of, strategy_of
from ...rules.reading import input_shapes, output_indices, output_shapes
from .samples import MADE, Factor, SampleDim, Tensor, factor_at, sample_dim_in, tensors_of

aten = torch.ops.aten
AXIS = "micro_batch"
FIX = "use one micro-batch"

OFFSET = (aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar)  # with a number as the second argument


class NeedsAllSamples(MicroBatchError):
    """An op that needs all samples of the batch. `op`: its name; `argument`: that of a sum that it reads whole, if the
    sum is why."""

    op: str = ""
    argument: str | None = None

    @classmethod
    def of(cls, message: str, node: fx.Node, argument: fx.Node | None = None) -> NeedsAllSamples:
        """Return the error about a node."""
        error = cls(message, node=describe(node), source=node.meta.get("source") or None, fix=FIX)
        error.op, error.argument = node.name, argument.name if argument is not None else None
        return error


@dataclass(frozen=True)
class BatchAxis:
    """The layouts of one graph over the axis: of ops and leaves by name. `totals`: sums over the batch that follow from
    inputs alone and that other ops read whole. `shares`: by the op (or output) that reads them, values that do not
    depend on the batch and are added to sums over it, so that each micro-batch adds its share of them alone; numbers
    that ops of OFFSET add where it is empty."""

    mesh: Mesh
    nodes: dict[str, NodeSharding]
    leaves: dict[str, Layout]
    outputs: tuple[Layout | None, ...]
    totals: tuple[fx.Node, ...]
    shares: dict[fx.Node, frozenset[fx.Node]]


def batch_axis(graph: fx.Graph, micro_batches: int, samples: int) -> BatchAxis:
    """Return the sharding of a joint graph for `micro_batches` parts of a batch of `samples`: over as many positions,
    or over one for each sample if the parts are not equal, of which a part takes several. Raises MicroBatchError for a
    graph that cannot be computed part by part, with the op that needs other samples."""
    if micro_batches > samples:
        raise MicroBatchError(
            f"a batch of {samples} samples cannot be cut into {micro_batches} micro-batches",
            fix=f"use {samples} micro-batches, or fewer",
        )
    places = samples if samples % micro_batches else micro_batches
    inputs = (n for n in graph.find_nodes(op="placeholder") if n.meta["role"].kind == "input")
    have_samples = ((n, 0) for n in inputs if n.meta["val"].shape[:1] == (samples,))
    return axis_from(graph, places, dict.fromkeys(have_samples, (0, 1)))


def axis_from(
    graph: fx.Graph, places: int, known: Mapping[Tensor, SampleDim], given: Mapping[fx.Node, NodeSharding] = {}
) -> BatchAxis:
    """Return the sharding of a joint graph over an axis with so many places, which cuts dims of tensors that are
    `known` and all that follows from them. `given`: the layouts of ops that no rule cuts so. Raises MicroBatchError as
    `batch_axis` does."""
    rules = {node: _rule_of(node) for node in graph.nodes if is_op(node) and node not in given}
    return _Layouts(graph, Mesh((AXIS,), (places,)), rules, _Samples(graph, rules, known, given), given).found()


def _rule_of(node: fx.Node) -> Rule | None:
    """Return the rule of an op. A cast in the backward is linear also where it rounds: every micro-batch rounds its own
    gradients, as it does where each has a backward of its own."""
    rule = rule_of(node)
    if rule is not None and node.target is aten._to_copy.default and node.meta.get("phase") == "backward":
        if operand(node).meta["val"].is_floating_point() and node.meta["val"].is_floating_point():
            return replace(rule, linear=(frozenset({0}),))
    return rule


class _Samples:
    """Finds where samples are: `sample_dim` has (dim, parts) of every tensor with any, `factor` that of every op."""

    def __init__(
        self,
        graph: fx.Graph,
        rules: dict[fx.Node, Rule | None],
        known: Mapping[Tensor, SampleDim],
        given: Mapping[fx.Node, NodeSharding],
    ):
        self.rules, self.given = rules, given
        self.sample_dim: dict[Tensor, SampleDim] = {}
        self.factor: dict[fx.Node, Factor] = {}
        self.users: dict[Tensor, list[fx.Node]] = {}
        for node in rules:
            for argument in tensor_arguments(node):
                self.users.setdefault(tensor_of(argument), []).append(node)
        self.waiting: deque[fx.Node] = deque()
        for tensor, sample_dim in known.items():
            self._put(tensor, sample_dim)
        while self.waiting:
            self._spread(self.waiting.popleft())

    def _put(self, tensor: Tensor, sample_dim: SampleDim) -> None:
        self.sample_dim[tensor] = sample_dim
        producer = tensor[0]
        self.waiting.extend(self.users.get(tensor, ()))
        if producer in self.rules:
            self.waiting.append(producer)
        elif producer not in self.given and producer.meta["role"].kind not in ("input", "cotangent"):
            role = producer.meta["role"]
            if role.kind == "tangent":
                raise MicroBatchError(
                    f"output {role.name} has a gradient of its own for every sample of the batch",
                    node=describe(producer),
                    fix="return one loss, as the field or key loss if there are other outputs, or give a loss_fn",
                )
            raise MicroBatchError(
                f"the {role.kind} {role.name} has a value for every sample of the batch",
                node=describe(producer),
                fix=FIX,
            )

    def _spread(self, node: fx.Node) -> None:
        """Carry the dim of the samples from the tensors of an op where it is known to its others."""
        if (rule := self.rules[node]) is None:
            raise _mixes(node)
        tensors = tensors_of(node, rule)
        factors = {factor_at(node, rule, dims, self.sample_dim[t]) for t, dims in tensors if t in self.sample_dim}
        if not factors:
            return
        if len(factors) != 1 or None in factors:
            raise _mixes(node)
        (factor,) = factors
        self.factor[node] = factor
        for tensor, dims in tensors:
            sample_dim = sample_dim_in(dims, factor)
            if self.sample_dim.get(tensor, sample_dim) != sample_dim:
                raise _mixes(node)
            if sample_dim is not None and tensor not in self.sample_dim:
                self._put(tensor, sample_dim)


def partial_of(value: fx.Node) -> Layout:
    """Return the layout of a sum over the batch."""
    ndim = value.meta["val"].dim()
    return Layout(((),) * ndim, ((AXIS, "sum"),), (1,) * ndim)


def _mixes(node: fx.Node) -> NeedsAllSamples:
    return NeedsAllSamples.of(
        f"{node.name} computes with all samples of the batch at once, so that it cannot run one micro-batch at a time",
        node,
    )


class _Layouts:
    """Layouts in the order of the graph, from the dims of the samples: what is summed over them is Partial until
    something reads it that is not linear."""

    def __init__(
        self,
        graph: fx.Graph,
        mesh: Mesh,
        rules: dict[fx.Node, Rule | None],
        samples: _Samples,
        given: Mapping[fx.Node, NodeSharding],
    ):
        self.graph, self.mesh, self.rules, self.samples, self.given = graph, mesh, rules, samples, given
        self.layout: dict[Tensor, Layout] = {}
        self.of_inputs: set[fx.Node] = set()  # what follows from inputs and constants alone
        self.totals: dict[fx.Node, None] = {}
        self.shares: dict[fx.Node, frozenset[fx.Node]] = {}
        self.strategies: dict[tuple, Strategy | None] = {}

    def found(self) -> BatchAxis:
        """Return the BatchAxis of the graph. Raises MicroBatchError where an op, output or buffer needs other
        samples."""
        nodes, leaves = {}, {}
        for node in self.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                leaves[node.name] = self.layout[node, 0] = self._leaf(node)
                if node.op == "get_attr" or node.meta["role"].kind == "input":
                    self.of_inputs.add(node)
            elif is_op(node):
                if all(tensor_of(a)[0] in self.of_inputs for a in node.all_input_nodes):
                    self.of_inputs.add(node)
                nodes[node.name] = sharding = self.given[node] if node in self.given else self._op(node)
                for i, layout in zip(output_indices(node), sharding.outputs):
                    self.layout[node, i] = layout
        outputs = [self._output(v, r) if is_tensor(v) else None for v, r in outputs_of(self.graph)]
        return BatchAxis(self.mesh, nodes, leaves, tuple(outputs), tuple(self.totals), self.shares)

    def _output(self, value: fx.Node, role: OutputRole) -> Layout:
        layout = self.layout[tensor_of(value)]
        if role.kind == "mutation" and not layout.is_replicated:
            raise MicroBatchError(
                f"the buffer {role.name} follows the whole batch",
                node=describe(value),
                source=value.meta.get("source") or None,
                fix=FIX,
            )
        if any(reduction != "sum" for _, reduction in layout.partial):
            raise _mixes(value)
        if role.kind == "gradient" and layout.is_replicated:
            self._share(output_node(self.graph), value)
            return partial_of(value)
        return layout

    def _leaf(self, node: fx.Node) -> Layout:
        value = node.meta.get("val")
        return self._sharded(node, 0, value.dim() if isinstance(value, torch.Tensor) else 0)

    def _sharded(self, node: fx.Node, index: int, ndim: int) -> Layout:
        dims: list[tuple[str, ...]] = [()] * ndim
        parts = [1] * ndim
        if (node, index) in self.samples.sample_dim:
            dim, count = self.samples.sample_dim[node, index]
            dims[dim], parts[dim] = (AXIS,), count
        return Layout(tuple(dims), (), tuple(parts))

    def _op(self, node: fx.Node) -> NodeSharding:
        arguments, rule = tensor_arguments(node), self.rules[node]
        layouts = [self.layout[tensor_of(a)] for a in arguments]
        factor, inside = self.samples.factor.get(node, ("", 1))
        if rule is None:
            layouts = [self._whole(node, a) if l.partial else l for a, l in zip(arguments, layouts)]
            return NodeSharding(tuple(layouts), tuple(Layout.replicated(v.dim()) for v in values_of(node)))
        if node.target in OFFSET and len(layouts) == 1 and layouts[0] == partial_of(arguments[0]):
            self.shares[node] = frozenset()
            return NodeSharding((layouts[0],), (layouts[0],))
        partial = self._partial(node, rule, layouts, bool(factor))
        for i, argument in enumerate(arguments if node.target not in MADE else ()):
            if layouts[i].partial and i not in partial:
                layouts[i] = self._whole(node, argument)
            elif i in partial and not layouts[i].partial:
                layouts[i] = self._share(node, argument)
        label = (factor if inside == 1 else f"{factor}/{inside}") or (
            "+" + ",".join(map(str, sorted(partial))) if partial else ""
        )
        chosen = self._strategy(node, rule, label)
        if chosen is None or list(chosen.inputs) != layouts and node.target not in MADE:
            raise _mixes(node)
        return NodeSharding(tuple(layouts), chosen.outputs, chosen.choice)

    def _strategy(self, node: fx.Node, rule: Rule, label: str) -> Strategy | None:
        """Return the strategy of an op that a label names, found once for all ops of one rule and shape."""
        ends = tuple(map(tuple, input_shapes(node))), tuple(map(tuple, output_shapes(node)))
        key = (id(rule), label, ends)
        if key not in self.strategies:
            self.strategies[key] = strategy_of(rule, (label,), *ends, self.mesh)
        return self.strategies[key]

    def _partial(self, node: fx.Node, rule: Rule, layouts: list[Layout], has_samples: bool) -> frozenset[int]:
        """Return the arguments that an op takes as sums over the batch that are still to be added up: those that are,
        if it is linear in them; else those of them that are not known before the step, with others that do not depend
        on the batch."""
        partial = frozenset(i for i, l in enumerate(layouts) if l.partial)
        if has_samples or partial in rule.linear:
            return frozenset() if has_samples else partial
        unknown = frozenset(i for i in partial if tensor_of(tensor_arguments(node)[i])[0] not in self.of_inputs)
        sums = [arguments for arguments in rule.linear if unknown and unknown <= arguments]
        return min(sums, key=len, default=frozenset())

    def _share(self, node: fx.Node, argument: fx.Node) -> Layout:
        """Take a value that does not depend on the batch as the sum of equal shares, and return its layout."""
        if not argument.meta["val"].is_floating_point():
            raise _mixes(node)
        self.shares[node] = self.shares.get(node, frozenset()) | {argument}
        return partial_of(argument)

    def _whole(self, node: fx.Node, argument: fx.Node) -> Layout:
        """Take the whole of a value that is summed over the batch, for an op that needs the sum, and return its layout.
        Raises MicroBatchError unless it is known before the step, as what follows from inputs is."""
        producer, _ = tensor_of(argument)
        if producer not in self.of_inputs:
            raise NeedsAllSamples.of(
                f"{node.name} needs {argument.name}, a sum over all samples of the batch that is not known before all "
                "micro-batches have been computed",
                node,
                argument,
            )
        self.totals[argument] = None
        return Layout.replicated(argument.meta["val"].dim())
