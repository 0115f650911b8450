"""Turn the joint graph of a whole batch into that of one of its micro-batches, which run one after the other.

The graph is cut along the samples as for one more mesh axis (passes/pipeline/batch_axis.py), so what it computes is
what the whole batch computes: a mean over the batch's valid tokens stays that, whatever tokens a micro-batch has.
Gradients and outputs that are sums over the batch add up over the micro-batches; outputs with samples are joined along
them. A sum that ops need before the last micro-batch has run (the number of valid tokens) follows from the inputs: a
graph of its own computes it first, and micro-batches read it. What does not depend on the batch (the norm of a weight
in the loss) is added in equal shares. Random ops draw the numbers of their samples: the random state of a micro-batch
has its number."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import fx

from ..._torch import graph_module
from ...errors import MicroBatchError, StageError
from ...frontend.export import Captured
from ...ir.graph import OutputRole, describe, output_node, outputs_of
from ...ops.streams import stream_of
from ...plans.pipeline import Pipeline, sizes_of
from .batch_axis import AXIS, FIX, BatchAxis
from .compact import compact_of, few_of
from .one_part import one_part
from .tail import Tail, without_tail
from .unroll_few import unroll_few

if TYPE_CHECKING:
    from .sequence_chunks import Chunks

aten = torch.ops.aten
SUM, SAME = "sum", "same"


@dataclass(frozen=True)
class MicroBatched:
    """captured: the joint graph of one micro-batch, whose placeholders of role "total" take the results of `totals`, a
    graph of the whole batch's inputs `total_inputs` (names). joins: by the position of an output of the call, how those
    of all micro-batches become one: "sum", "same", or the dim along which they are joined. `smaller`: the same graph of
    one sample less, for the last micro-batches of a batch of `samples` that they do not divide; its nodes have the same
    names. `tail`: what is computed once, between the forwards of all micro-batches and their backwards. `chunks`: of
    each size of a micro-batch, what makes it a part of the tokens of `rows`, which are the batch cut into fewer, whole
    rows (see sequence_chunks.py)."""

    captured: Captured
    micro_batches: int
    joins: dict[str, str | int]
    totals: fx.GraphModule | None = None
    total_inputs: tuple[str, ...] = ()
    input_dims: dict[str, int] | None = None
    smaller: Captured | None = None
    samples: int = 0
    tail: Tail | None = None
    chunks: tuple[Chunks, ...] = ()
    rows: MicroBatched | None = None

    @property
    def chunks_of_row(self) -> int:
        """Return into how many chunks of tokens a row is cut, which follow one another; 1 where rows are whole."""
        return self.chunks[0].count if self.chunks else 1

    @property
    def of_rows(self) -> MicroBatched:
        """Return the batch cut into micro-batches of whole rows."""
        return self if self.rows is None else self.rows

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the number of samples of each micro-batch."""
        count = self.chunks_of_row
        return tuple(size for size in sizes_of(self.samples, self.micro_batches // count) for _ in range(count))

    @property
    def overlay(self) -> fx.Graph | None:
        """Return the graph of the smaller micro-batches whose nodes have the names of those that are planned: of few
        blocks, where those of the others are."""
        if self.smaller is None:
            return None
        return (self.smaller.compact or self.smaller.graph_module).graph

    @property
    def order(self) -> str:
        """Return the schedule of a step without stages: each backward follows its forward, or all follow all forwards
        where a tail comes between them."""
        return Pipeline.schedule if self.tail is None else "gpipe"

    @property
    def in_flight(self) -> float:
        """Return how many micro-batches as large as the largest a step without stages holds at once: all of them where
        their backwards wait for a tail."""
        return 1.0 if self.tail is None else sum(self.sizes) / self.sizes[0]

    def is_smaller(self, number: int) -> bool:
        """Return whether a micro-batch runs the graph of one sample less."""
        return self.smaller is not None and self.sizes[number] < self.sizes[0]

    def start(self, number: int) -> int:
        """Return where a micro-batch begins, in micro-batches before it or, if they are not equal, in samples: its
        random state has it."""
        return number if self.smaller is None else sum(self.sizes[:number])


@dataclass(frozen=True)
class FewBlocks:
    """Holds what the planner reads of a batch that is cut into micro-batches. `captured`: the graph of one of them, of
    few blocks if the model is deep; `cut`: then the graph of the whole batch and its axis, unless it has a tail."""

    captured: Captured
    cut: tuple[fx.GraphModule, BatchAxis] | None = None


def micro_batch(captured: Captured, micro_batches: int, few: Sequence[FewBlocks] = ()) -> MicroBatched:
    """Return the graph of one of so many micro-batches. `few`: what `few_blocks` gave for them, the smaller
    micro-batches' last, if it was asked before. Raises MicroBatchError, with the op, if they cannot be
    computed one by one, and StageError for a call that gives gradients to inputs, or writes to them or to
    parameters."""
    _check_roles(captured.graph)
    samples = _samples(captured)
    if micro_batches == 1:
        roles = output_node(captured.graph).meta["roles"]
        return MicroBatched(
            captured, 1, {r.name: SAME for r in roles if r.kind == "output"}, input_dims={}, samples=samples
        )
    if captured.compact is not None:
        few = few or [_few(captured, micro_batches, count) for count in spans_of(samples, micro_batches)]
    tail, found, compact = None, _unrolled(captured, few), captured.compact
    sums: tuple[fx.GraphModule, Sequence[fx.Node]]
    if found is not None and compact is not None and few[0].cut is not None:
        body, axis = few[0].cut
        sums = captured.graph_module, [compact.nodes(node, 0)[0] for node in axis.totals]
    else:
        body, axis, tail = without_tail(captured.graph_module, micro_batches, samples)
        found = _cut(captured if tail is None else replace(captured, graph_module=body), axis, micro_batches, few)
        sums = body, axis.totals
    graph = body.graph
    roles = output_node(graph).meta["roles"]
    _check_in_one_piece(graph, axis)
    if any(one.compact is None for one in found):  # nodes of both have the same names
        found = [replace(one, compact=None) for one in found]
    joins: dict[str, str | int] = dict.fromkeys(tail.outputs, SAME) if tail is not None else {}
    for role, layout in zip(roles, axis.outputs):
        if role.kind == "output":
            joins[role.name] = SUM if layout is not None and layout.partial else SAME
            if layout is not None and (dim := layout.dim_of(AXIS)) is not None:
                joins[role.name] = dim
    totals, inputs = _totals(*sums) if axis.totals else (None, ())
    dims = {
        n.meta["role"].name: d
        for n in graph.nodes
        if n.op == "placeholder" and n.meta["role"].kind == "input"
        if (d := axis.leaves[n.name].dim_of(AXIS)) is not None
    }
    return MicroBatched(found[0], micro_batches, joins, totals, inputs, dims, *found[1:] or (None,), samples, tail)


def _check_roles(graph: fx.Graph) -> None:
    """Raise StageError for gradients of inputs and for writes to inputs or parameters. Gradients of inputs would have
    to leave a schedule that is over when the call returns; what one micro-batch writes to a parameter or to the batch,
    the others would read or overwrite."""
    parameters = {
        n.meta["role"].name for n in graph.nodes if n.op == "placeholder" and n.meta["role"].kind == "parameter"
    }
    for node, role in outputs_of(graph):
        if role.kind == "input_gradient":
            raise StageError(
                f"{role.name} requires a gradient, and stages and micro-batches give gradients to parameters only",
                fix=f"pass {role.name}.detach(), make what computes it a part of the model, or use one "
                "micro-batch and a mesh without pp",
            )
        if role.kind == "input_mutation" or role.kind == "mutation" and role.name in parameters:
            raise StageError(
                f"the forward writes to {role.name} in place, and each micro-batch would",
                source=node.meta.get("source") or None,
                fix="write to it outside of the forward, or use one micro-batch and a mesh without pp",
            )


def _check_in_one_piece(graph: fx.Graph, axis: BatchAxis) -> None:
    """Raise MicroBatchError for an input or output of the call that has its samples several times one after the
    other."""
    leaves = [(n, n.meta["role"], axis.leaves[n.name]) for n in graph.find_nodes(op="placeholder")]
    ends = [(value, role, layout) for (value, role), layout in zip(outputs_of(graph), axis.outputs)]
    for node, role, layout in leaves + ends:
        if layout is None or role.kind not in ("input", "output"):
            continue
        dim = layout.dim_of(AXIS)
        if dim is not None and (times := layout.parts[dim]) > 1:
            raise MicroBatchError(
                f"{role.kind} {role.name} has the samples of the batch {times} times in dim {dim}, one after the other",
                node=describe(node),
                source=node.meta.get("source") or None,
                fix=f"{FIX}, or pass and return one tensor for each time",
            )


def _samples(captured: Captured) -> int:
    return next((shape[0] for shape in captured.signature.shapes if shape), 1)


def spans_of(samples: int, micro_batches: int) -> tuple[int, ...]:
    """Return over how many positions along the batch's axis micro-batches span, the larger ones first; all over one if
    they are equal."""
    sizes = sizes_of(samples, micro_batches)
    return (1,) if sizes[0] == sizes[-1] else (sizes[0], sizes[-1])


def _has_random(graph: fx.Graph) -> bool:
    return any(stream_of(node) is not None for node in graph.nodes)


def _unrolled(captured: Captured, few: Sequence[FewBlocks]) -> list[Captured] | None:
    """Return the graphs of micro-batches of a deep model, of each size, as those of few blocks say what they are; None
    if these do not say all: of a tail, and of what every block has of its own, random numbers, outputs and sums over
    the batch."""
    old = captured.compact
    cuts = [one.cut for one in few if one.cut is not None]
    if old is None or len(cuts) < len(few) or _has_random(captured.graph):
        return None
    has_sums = any(old.is_inner(old.block(node)) for _, axis in cuts for node in axis.totals)
    if has_sums or _outputs(old.graph) != _outputs(captured.graph):
        return None
    found = []
    for small in (one.captured.graph_module for one in few):
        if (local := unroll_few(old, small, captured.graph_module)) is None:
            return None
        found.append(replace(captured, graph_module=local, compact=compact_of(old, small, local)))
    return found


def _outputs(graph: fx.Graph) -> list[str]:
    return [role.name for _, role in outputs_of(graph) if role.kind == "output"]


def _cut(captured: Captured, axis: BatchAxis, micro_batches: int, few: Sequence[FewBlocks]) -> list[Captured]:
    """Return the graphs of micro-batches of each size. `few`: those of few blocks, if it is a deep model."""
    checks, old = not few or _has_random(captured.graph), captured.compact  # equal blocks are alike
    counts, found = spans_of(_samples(captured), micro_batches), []
    for count, small in itertools.zip_longest(counts, few):
        local = one_part(captured.graph_module, axis, micro_batches, count, checks)
        compact = old and compact_of(old, small.captured.graph_module, local)
        found.append(replace(captured, graph_module=local, compact=compact))
    return found


def _few(captured: Captured, micro_batches: int, count: int) -> FewBlocks:
    """Return the graph of few blocks for micro-batches that span `count` positions, whose nodes keep their names."""
    old = captured.compact
    assert old is not None  # who asks has looked
    body, axis, tail = without_tail(old.graph_module, micro_batches, _samples(captured))
    small = one_part(body, axis, micro_batches, count)
    few = replace(captured, graph_module=small, compact=few_of(old, small))
    return FewBlocks(few, (body, axis)) if tail is None else FewBlocks(few)


def few_blocks(captured: Captured, micro_batches: int, smaller: bool = False) -> FewBlocks:
    """Return what the planner reads of `micro_batch`, in less time: of a deep model only the few blocks of its compact
    graph are cut, so that no op of the whole graph is known. `smaller`: of the micro-batches of one sample less. Raises
    as `micro_batch` does."""
    _check_roles(captured.graph)
    if captured.compact is None or micro_batches == 1:
        micro = micro_batch(captured, micro_batches)
        return FewBlocks(micro.smaller if smaller else micro.captured)
    return _few(captured, micro_batches, spans_of(_samples(captured), micro_batches)[-1 if smaller else 0])


def _totals(joint: fx.GraphModule, totals: Iterable[fx.Node]) -> tuple[fx.GraphModule, tuple[str, ...]]:
    """Return the graph that computes sums over the whole batch from its inputs, and the names of those."""
    needed, stack = set(), list(totals)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    graph, inputs = fx.Graph(), []
    new: dict[fx.Node, fx.Node] = {}
    for node in joint.graph.nodes:
        if node in needed:
            new[node] = graph.node_copy(node, new.__getitem__)
            if node.op == "placeholder":
                inputs.append(node.meta["role"].name)
    graph.output(tuple(new[node] for node in totals)).meta["roles"] = [
        OutputRole("output", str(i)) for i, _ in enumerate(totals)
    ]
    return graph_module(joint, graph, "Totals"), tuple(inputs)
