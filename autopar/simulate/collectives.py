"""Run the graphs of all ranks in one process, in lock step, and carry out their collectives.

Each rank's graph runs up to its next collective; when all members of a group stand at one, and it is the same one, it
is performed on their real tensors. Ranks that disagree, or that wait for one that never comes, are reported with
their nodes: what hangs a cluster is an error message here. Bytes are counted by the ring formulas, for each rank.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .._torch import c10d
from .._torch.regions import no_autocast
from ..errors import VerifyError
from ..ir.graph import bytes_of
from ..ir.layout import Layout, dim_ranges
from ..ir.mesh import Mesh
from ..ops import autopar, ring_documents, row_rounds
from ..ops.expert_rows import sizes

REDUCE = {
    "sum": lambda stack: stack.sum(0, dtype=stack.dtype),
    "avg": lambda stack: stack.mean(0),
    "max": lambda stack: stack.amax(0),
    "min": lambda stack: stack.amin(0),
}

EXCHANGES = (
    c10d.all_to_all_single.default, autopar.exchange_rows.default, autopar.exchange_reached.default,
)  # fmt: skip


@dataclass(frozen=True)
class CollectiveCall:
    """A rank's call of the collective `target`: it stands at `node` with `tensor` and waits for the others of its
    group."""

    node: fx.Node
    target: Any
    tensor: torch.Tensor
    args: tuple
    axes: tuple[str, ...]

    @property
    def signature(self) -> tuple:
        """Return what all members must agree on. Rows that an all-to-all sends to each may differ."""
        tail = self.tensor.shape[1:] if self.target in EXCHANGES else self.tensor.shape
        args = () if self.target in EXCHANGES else self.args
        return self.name, args, tuple(tail), self.tensor.dtype

    @property
    def name(self) -> str:
        """Return the name of the collective, the same whether it happens in place or not."""
        return self.target.overloadpacket.__name__.removesuffix("_")

    def __str__(self) -> str:
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        reduction = "".join(f" {a}" for a in self.args if isinstance(a, str))
        return (
            f"{self.node.name} ({self.name}{reduction} over {','.join(self.axes)}, {tuple(self.tensor.shape)} {dtype})"
        )


class Simulator:
    """Runs one graph a rank. `bytes_sent[rank]` and `calls` (op name, axes, ranks) add up over runs."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.bytes_sent = [0.0] * mesh.devices
        self.calls: list[tuple[str, tuple[str, ...], tuple[int, ...]]] = []

    def run(self, graphs: Sequence[fx.GraphModule], inputs: Sequence[Sequence[torch.Tensor]]) -> list[tuple]:
        """Return the outputs of all ranks' graphs. Raises VerifyError if their collectives do not fit together."""
        with no_autocast():
            return self._run(graphs, inputs)

    def _run(self, graphs: Sequence[fx.GraphModule], inputs: Sequence[Sequence[torch.Tensor]]) -> list[tuple]:
        programs = [_steps(graph, values) for graph, values in zip(graphs, inputs, strict=True)]
        waiting: dict[int, CollectiveCall] = {}
        outputs: dict[int, tuple] = {}
        answers: dict[int, torch.Tensor | None] = dict.fromkeys(range(len(programs)))
        while answers:
            for rank, answer in answers.items():
                try:
                    waiting[rank] = programs[rank].send(answer)
                except StopIteration as end:
                    outputs[rank] = end.value
            answers = self._perform(waiting, outputs)
            for rank in answers:
                del waiting[rank]
        return [outputs[rank] for rank in range(len(programs))]

    def _perform(self, waiting: Mapping[int, CollectiveCall], outputs: Mapping[int, tuple]) -> dict[int, torch.Tensor]:
        """Perform all collectives whose whole group has arrived, and return their results by rank."""
        answers: dict[int, torch.Tensor] = {}
        for rank, request in waiting.items():
            group = self.mesh.group(request.axes, rank)
            members = [waiting.get(r) for r in group]
            if rank != group[0] or any(m is None or m.axes != request.axes for m in members):
                continue
            if any(m.signature != request.signature for m in members):
                raise _disagreement("the ranks of a group call different collectives", waiting, group)
            results, sent = _collective(members)
            self.calls.append((request.name, request.axes, group))
            for member, result, bytes_ in zip(group, results, sent):
                answers[member] = result
                self.bytes_sent[member] += bytes_
        if waiting and not answers:
            finished = f"; ranks {sorted(outputs)} have finished" if outputs else ""
            raise _disagreement(f"deadlock: no collective has all its ranks{finished}", waiting, sorted(waiting))
        return answers


def _steps(module: fx.GraphModule, inputs: Sequence) -> Generator[CollectiveCall, torch.Tensor, tuple]:
    """Run a graph node by node, yield at collectives, return the outputs. Values live until their last use."""
    last_use = {}
    for node in module.graph.nodes:
        for used in node.all_input_nodes:
            last_use[used] = node
    values: dict[fx.Node, Any] = {}
    remaining = iter(inputs)
    for node in module.graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "placeholder":
            values[node] = next(remaining)
        elif node.op == "get_attr":
            values[node] = getattr(module, node.target)
        elif node.op == "output":
            return tuple(args[0])
        elif node.target is autopar.in_rounds.default:
            values[node] = yield from _in_rounds(node, args)
        else:
            values[node] = yield from _called(node, node.target, args, kwargs)
        for used in node.all_input_nodes:
            if last_use[used] is node:
                del values[used]
    return ()


def _called(node: fx.Node, target: Any, args: tuple, kwargs: Mapping) -> Generator[CollectiveCall, torch.Tensor, Any]:
    """Return the value of an op that is called at a node, yield if it is a collective."""
    if target is c10d.wait_tensor.default:
        return args[0]
    if getattr(target, "namespace", "") == "_c10d_functional":
        return (yield CollectiveCall(node, target, args[0], tuple(args[1:-1]), tuple(args[-1].split(","))))
    if target is autopar.exchange_rows.default:
        sent, received = sizes(*args[1:3])
        return (yield CollectiveCall(node, target, args[0], (received, sent), tuple(args[-1].split(","))))
    if target is autopar.exchange_reached.default:
        *_, reached, place, step, of_gradients, first, expected, axes = args
        sent, received = ring_documents.counts(reached, place, step, of_gradients)
        rows = ring_documents.outgoing(*args[:7])
        arrived = yield CollectiveCall(node, target, rows, (received, sent), tuple(axes.split(",")))
        return ring_documents.placed(arrived, reached, place, step, of_gradients, first, expected)
    return target(*args, **kwargs)


def _in_rounds(node: fx.Node, args: tuple) -> Generator[CollectiveCall, torch.Tensor, torch.Tensor]:
    """Return the number of rounds that a rank makes at a node, yield at their collectives."""
    steps, value = row_rounds.rounds(*args), None
    while True:
        try:
            call = steps.send(value)
        except StopIteration as end:
            return end.value
        value = yield from _called(node, *call)


def _collective(members: Sequence[CollectiveCall]) -> tuple[list[torch.Tensor], list[float]]:
    """Return result and bytes sent of every member. Ring formulas: b is the bytes of one's input, n their number."""
    request, tensors, n = members[0], [m.tensor for m in members], len(members)
    b, op, args = bytes_of(request.tensor), request.target, request.args
    if op in (c10d.all_reduce.default, c10d.all_reduce_.default):
        total = REDUCE[args[0]](torch.stack(tensors))
        results = [t.copy_(total) if op is c10d.all_reduce_.default else total.clone() for t in tensors]
        return results, [2 * (n - 1) / n * b] * n
    if op is c10d.all_gather_into_tensor.default:
        whole = torch.cat(tensors)
        return [whole.clone() for _ in members], [(n - 1) * b] * n
    if op is c10d.reduce_scatter_tensor.default:
        total = REDUCE[args[0]](torch.stack(tensors))
        return [part.clone() for part in total.chunk(n)], [(n - 1) / n * b] * n
    if op in EXCHANGES:
        return _exchange(members)
    if op is c10d.broadcast.default:
        return [tensors[args[0]].clone() for _ in members], [b if i == args[0] else 0.0 for i in range(n)]
    raise VerifyError(f"the simulator does not know the collective {op}", node=request.node.name)


def _exchange(members: Sequence[CollectiveCall]) -> tuple[list[torch.Tensor], list[float]]:
    """Perform all_to_all_single; args are rows received from each member, then rows sent to each."""
    for receiver, request in enumerate(members):
        expected = [sender.args[1][receiver] for sender in members]
        if list(request.args[0]) != expected:
            raise VerifyError(f"{request.node.name} expects {list(request.args[0])} rows and is sent {expected}")
    chunks = [m.tensor.split(list(m.args[1])) for m in members]
    results = [torch.cat([sent[i] for sent in chunks]) for i in range(len(members))]
    return results, [sum(bytes_of(p) for j, p in enumerate(sent) if j != i) for i, sent in enumerate(chunks)]


def _disagreement(message: str, waiting: Mapping[int, CollectiveCall], ranks: Sequence[int]) -> VerifyError:
    """Return an error that lists where each rank stands; ranks at the same collective share a line."""
    ranks_at: dict[str, list[int]] = {}
    for rank in ranks:
        ranks_at.setdefault(str(waiting[rank]), []).append(rank)
    where = "; ".join(f"rank {', '.join(map(str, at))} at {call}" for call, at in ranks_at.items())
    node = waiting[ranks[0]].node
    return VerifyError(f"{message}: {where}", node=node.name, source=node.meta.get("source") or None)


def assemble(blocks: Sequence[torch.Tensor], layout: Layout, mesh: Mesh, shape: Sequence[int]) -> torch.Tensor:
    """Return the global tensor of which rank r holds blocks[r]: shards are put in place, partial values are reduced."""
    reductions = {reduction for _, reduction in layout.partial}
    if len(reductions) > 1:
        raise VerifyError(f"a value that is partial in two ways cannot be assembled: {layout}")
    largest = reductions == {"max"}
    result = blocks[0].new_full(tuple(shape), float("-inf") if largest else 0)
    split = {*layout.sharding_axes, *(axis for axis, _ in layout.partial)}
    for rank, block in enumerate(blocks):
        coordinate = mesh.coordinate(rank)
        if any(position for axis, position in coordinate.items() if axis not in split):
            continue  # a replica of one that was taken
        index = []
        for size, axes, parts in zip(shape, layout.dims, layout.parts):
            ranges = dim_ranges(size, axes, parts, mesh, coordinate) if axes else [(0, size)]
            index.append(torch.cat([torch.arange(*r) for r in ranges]))
        where = torch.meshgrid(*index, indexing="ij") if index else ()
        result[where] = torch.maximum(result[where], block) if largest else result[where] + block
    return result
