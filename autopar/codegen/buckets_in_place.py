"""Buckets without copies: gradients are written where their bucket sends them, parameters received where they are read.

A bucket is packed by copying its tensors side by side, and unpacked into views or copies (passes/distribute/bucket.py).
Where a product makes a gradient that is all-reduced, it can as well write into its place in the bucket; the others are
copied there. All gradients are views of their bucket from the start, as with `gradient_as_bucket_view` of torch's
DistributedDataParallel. And where parameters are gathered on gloo, a bucket is one wait for several of those, and
nothing is packed (autopar/ops/on_gloo.py).

The order of the nodes counts from here on, since a view does not show what is written to its bucket: this comes last.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import fx

from .._torch import c10d
from ..ir.graph import operand
from .python_code import GATHERS_OF_BUCKETS

aten = torch.ops.aten


@dataclass(frozen=True)
class _Member:
    """Holds a tensor of a bucket: `row` is what is packed of it, `piece` what is unpacked; `result` has its shape."""

    row: fx.Node
    piece: fx.Node
    result: fx.Node

    @property
    def made(self) -> fx.Node:
        """Return the node that makes the tensor."""
        return operand(self.row)

    @property
    def is_product(self) -> bool:
        """Return whether a product makes it that nothing but the bucket reads."""
        return self.made.target is aten.mm.default and len(self.made.users) == 1

    @property
    def shape(self) -> list[int]:
        return list(cast(Sequence[int], self.result.args[1]))

    @property
    def start(self) -> int:
        """Return where its elements begin in a row of the bucket."""
        return cast(int, self.piece.args[2])


def buckets_in_place(module: fx.GraphModule) -> None:
    """Take copies into and out of the buckets out of a graph, in place."""
    for packed in [n for n in module.graph.nodes if n.target is aten.cat.default]:
        members = _members(packed, c10d.all_reduce_.default)
        if any(member.is_product for member in members):
            _write(packed, members)
        for gather, gather_bucket in GATHERS_OF_BUCKETS.items():
            if members := _members(packed, gather):
                _gather(packed, members, gather_bucket)
    module.recompile()


def _members(packed: fx.Node, collective: object) -> list[_Member]:
    """Return the tensors of a bucket that is packed for a collective, none if it is not."""
    columns = _reader(_reader(_reader(packed, collective), c10d.wait_tensor.default), aten.reshape.default)
    rows, pieces = cast(Sequence[fx.Node], packed.args[0]), list(columns.users) if columns else []
    if len(rows) != len(pieces) or any(n.target is not aten.slice.Tensor for n in pieces):
        return []
    found = []
    for row, piece in zip(rows, sorted(pieces, key=lambda piece: cast(int, piece.args[2]))):
        result = _reader(piece, aten.reshape.default)
        if row.target is not aten.reshape.default or result is None or len(row.users) > 1:
            return []
        found.append(_Member(row, piece, result))
    return found


def _reader(node: fx.Node | None, target: object) -> fx.Node | None:
    """Return the one node that reads a value, if it calls `target`."""
    users = list(node.users) if node is not None else []
    return users[0] if len(users) == 1 and users[0].target is target else None


def _write(packed: fx.Node, members: list[_Member]) -> None:
    """Make a bucket before the first product that writes into it, and views of it in the place of what was packed and
    unpacked."""
    graph, order = packed.graph, {node: i for i, node in enumerate(packed.graph.nodes)}
    first = min((m.made for m in members if m.is_product), key=order.__getitem__)
    with graph.inserting_before(first):
        size = [1, members[-1].piece.args[3]]
        bucket = graph.call_function(aten.new_empty.default, (operand(first), size))
    written = [m.made for m in members if m.is_product]
    for m in members:
        with graph.inserting_before(m.made if m.is_product else packed):
            strides = [math.prod(m.shape[i + 1 :]) for i in range(len(m.shape))]
            view = graph.call_function(aten.as_strided.default, (bucket, m.shape, strides, m.start))
            if m.is_product:
                graph.call_function(aten.mm.out, m.made.args, {"out": view})
            else:
                graph.call_function(aten.copy_.default, (view, m.made))
        m.result.replace_all_uses_with(view)
    columns = operand(members[0].piece)
    _erase([*(m.result for m in members), *(m.piece for m in members), columns])
    packed.replace_all_uses_with(bucket)
    _erase([packed, *(m.row for m in members), *written])


def _gather(packed: fx.Node, members: list[_Member], gather_bucket: Callable) -> None:
    """Gather the tensors of a bucket each into memory of its own, where the bucket was gathered."""
    (start,) = packed.users
    graph, columns = packed.graph, operand(members[0].piece)
    with graph.inserting_before(start):
        args = ([m.made for m in members], *start.args[1:])
        gathered = graph.call_function(gather_bucket, args)
        gathered.meta = dict(start.meta)
    for i, m in enumerate(members):
        with graph.inserting_before(m.result):
            m.result.replace_all_uses_with(graph.call_function(operator.getitem, (gathered, i)))
    wait = operand(columns)
    _erase([*(m.result for m in members), *(m.piece for m in members), columns, wait, start, packed])
    _erase([m.row for m in members])


def _erase(nodes: list[fx.Node]) -> None:
    for node in nodes:
        node.graph.erase_node(node)
