"""A batch as its micro-batches: what each of them is given, and one output of the call from those of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, fx

from ..ir.graph import output_node
from ..ir.layout import Layout
from ..ops.counter_rng import of_micro_batch
from ..passes.pipeline.micro_batch import SAME, SUM, MicroBatched


def parts_of(micro: MicroBatched, values: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return what each micro-batch is given by placeholder name: global inputs, sums over the whole batch, its random
    state."""
    if micro.rows is not None:
        alike: dict[str, Tensor] = {}
        of_rows = enumerate(parts_of(micro.rows, values))
        return [part for number, rows in of_rows for part in _chunks_of(micro, rows, number, alike)]
    leaves: dict[str, dict[str, str]] = {"input": {}, "random": {}}
    for node in micro.captured.graph.find_nodes(op="placeholder"):
        if (role := node.meta["role"]).kind in leaves:
            leaves[role.kind][role.name] = node.name
    named = {name: values[leaf] for name, leaf in leaves["input"].items()}
    whole = {leaf: values[leaf] for leaf in leaves["input"].values()} | totals_of(micro, named)
    parts = [dict(whole) for _ in range(micro.micro_batches)]
    for name, dim in (micro.input_dims or {}).items():
        if name in named:
            each = named[name].shape[dim] // micro.samples
            for part, chunk in zip(parts, named[name].split([each * size for size in micro.sizes], dim)):
                part[leaves["input"][name]] = chunk
    for leaf in leaves["random"].values():
        for i, part in enumerate(parts):
            part[leaf] = of_micro_batch(values[leaf], micro.start(i)) if micro.micro_batches > 1 else values[leaf]
    return parts


def _chunks_of(
    micro: MicroBatched, rows: Mapping[str, Tensor], number: int, alike: dict[str, Tensor]
) -> list[dict[str, Tensor]]:
    """Return what the chunks of a micro-batch of whole rows, the one of a `number`, are given. `alike`: leaves that are
    the same for all, held once."""
    chunks = micro.chunks[micro.is_smaller(number * micro.chunks_of_row)]
    graph = chunks.known.graph
    made = chunks.known(*(rows[node.name] for node in graph.find_nodes(op="placeholder")))
    leaves = {role.name: value for role, value in zip(output_node(graph).meta["roles"], made)}
    leaves |= {name: leaves[same] for name, same in chunks.again.items()}
    for name in chunks.alike:
        shape = leaves[name].shape  # of which smaller micro-batches may have less
        leaves[name] = alike.setdefault(f"{name} {tuple(shape)}", leaves[name])
    found = []
    for i in range(chunks.count):
        part = {name: _chunk(leaf, *chunks.cut[name], chunks.count, i) if name in chunks.cut else leaf
                for name, leaf in leaves.items()}  # fmt: skip
        for name, dim in chunks.growing.items():
            part[name] = part[name].narrow(dim, 0, (i + 1) * chunks.tokens)
        for node in micro.captured.graph.find_nodes(op="placeholder"):
            if node.meta["role"].kind == "random":
                part[node.name] = of_micro_batch(rows[node.name], i)
        found.append(part)
    return found


def _chunk(leaf: Tensor, dim: int, times: int, count: int, i: int) -> Tensor:
    """Return the `i`-th chunk of a leaf that has the tokens of a row so many `times` in a dim."""
    parts = [whole.chunk(count, dim)[i] for whole in leaf.chunk(times, dim)]
    return parts[0] if times == 1 else torch.cat(parts, dim)


def joined_output(micro: MicroBatched, name: str, parts: Sequence[Tensor]) -> Tensor:
    """Return one output of the call from those of its micro-batches."""
    if micro.rows is None:
        return join(parts, micro.joins[name])
    size, how = micro.chunks_of_row, micro.chunks[0].joins[name]
    rows = [join(parts[first : first + size], how) for first in range(0, len(parts), size)]
    return joined_output(micro.rows, name, rows)


def totals_of(micro: MicroBatched, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the sums over the whole batch by placeholder name, from its inputs by their names in the call."""
    if micro.totals is None:
        return {}
    results = micro.totals(*(inputs[name] for name in micro.total_inputs))
    leaves = [n for n in micro.captured.graph.nodes if n.op == "placeholder" and n.meta["role"].kind == "total"]
    return {n.name: results[int(n.meta["role"].name)] for n in leaves}


def join(parts: Sequence[Tensor], how: str | int) -> Tensor:
    """Join one output of the call from those of its micro-batches."""
    if how == SAME:
        return parts[0]
    return torch.stack(list(parts)).sum(0) if how == SUM else torch.cat(list(parts), how)


class TailRun:
    """Runs the tail of one call (see passes/pipeline/tail.py) when the last of what it reads has been taken. `tangent`
    gives the gradient of an output."""

    def __init__(self, micro: MicroBatched, tangent: Callable[[fx.Node], Tensor]):
        assert micro.tail is not None
        self.micro, self.tail, self.tangent = micro, micro.tail, tangent
        self.joined: dict[str, dict[int, Tensor]] = {name: {} for name in micro.tail.joined}
        leaves = micro.captured.graph.find_nodes(op="placeholder")
        self.leaves = {n.meta["role"].name: n.name for n in leaves if n.meta["role"].kind == "cotangent"}

    def take(self, name: str, i: int, value: Tensor) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]] | None:
        """Take a whole value of a micro-batch; return (outputs of the call by name, by micro-batch its cotangents by
        placeholder name) if it was the last one, else None."""
        self.joined[name][i] = value
        count = self.micro.micro_batches
        return self._run() if all(len(found) == count for found in self.joined.values()) else None

    def _run(self) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
        graph = self.tail.graph_module.graph
        values = [self._argument(node) for node in graph.find_nodes(op="placeholder")]
        outputs, parts = {}, [dict[str, Tensor]() for _ in range(self.micro.micro_batches)]
        made = (self.tail.run or self.tail.graph_module)(*values)
        for role, value in zip(output_node(graph).meta["roles"], made, strict=True):
            if role.kind == "output":
                outputs[role.name] = value
            else:
                for part, own in zip(parts, self._split(value, self.tail.cotangents[role.name])):
                    part[self.leaves[role.name]] = own
        return outputs, parts

    def _argument(self, node: fx.Node) -> Tensor:
        """Return what the tail takes for a placeholder, and let go of its parts."""
        role = node.meta["role"]
        if role.kind != "joined":
            return self.tangent(node)
        parts = self.joined.pop(role.name)
        return joined_as(self.tail.joined[role.name], [parts[i] for i in sorted(parts)])

    def _split(self, whole: Tensor, layout: Layout) -> list[Tensor]:
        """Return what each micro-batch has of a tensor of the whole batch."""
        found = _samples_in(layout)
        if found is None:
            return [whole] * self.micro.micro_batches
        dim, count = found
        each = whole.shape[dim] // count // self.micro.samples
        pieces = [p.split([each * size for size in self.micro.sizes], dim) for p in whole.chunk(count, dim)]
        return [torch.cat(mine, dim) for mine in zip(*pieces)]


def joined_as(layout: Layout, parts: Sequence[Tensor]) -> Tensor:
    """Return the tensor of the whole batch, given those of its micro-batches in a layout over their axis."""
    if layout.partial:
        return torch.stack(list(parts)).sum(0)
    if (found := _samples_in(layout)) is None:
        return parts[0]
    dim, count = found
    return torch.cat([piece for pieces in zip(*(part.chunk(count, dim) for part in parts)) for piece in pieces], dim)


def _samples_in(layout: Layout) -> tuple[int, int] | None:
    """Return the dim that has the samples, and in how many parts of it; None if there is none."""
    return next(((d, layout.parts[d]) for d, axes in enumerate(layout.dims) if axes), None)
