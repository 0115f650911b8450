"""Gradients written where their bucket sends them.

A bucket of all-reduced gradients is packed by copying them side by side, and unpacked into views of it
(passes/distribute/bucket.py). Where a product makes a gradient, it can as well write into its place in the bucket: that
saves the copy, and the gradient takes no memory beside its bucket. The others are copied there. All gradients are views
of their bucket from the start, as with `gradient_as_bucket_view` of torch's DistributedDataParallel.

The order of the nodes counts from here on, since a view does not show what is written to its bucket: this comes last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import fx

from .._torch import c10d
from ..ir.graph import operand

aten = torch.ops.aten


@dataclass(frozen=True)
class _Member:
    """A gradient in a bucket. `row` is what is packed of it, `piece` what is unpacked; the node `reduced` has the shape
    of the gradient."""

    row: fx.Node
    piece: fx.Node
    reduced: fx.Node

    @property
    def made(self) -> fx.Node:
        """Return the node that makes the gradient."""
        return operand(self.row)

    @property
    def is_product(self) -> bool:
        """Return whether a product makes it that nothing but the bucket reads."""
        return self.made.target is aten.mm.default and len(self.made.users) == 1

    @property
    def shape(self) -> list[int]:
        return list(self.reduced.args[1])

    @property
    def is_whole(self) -> bool:
        """Return whether the piece has as many elements as the gradient."""
        return self.piece.args[3] - self.piece.args[2] == math.prod(self.shape)


def write_into_buckets(module: fx.GraphModule) -> None:
    """Let products write into the buckets in which their results are all-reduced, in place."""
    for packed in [n for n in module.graph.nodes if n.target is aten.cat.default]:
        members = _members(packed)
        if any(member.is_product for member in members):
            _write(packed, members)
    module.recompile()


def _members(packed: fx.Node) -> list[_Member]:
    """Return the gradients in a bucket of them, none if that is not what is packed or if they are not all-reduced in
    its place."""
    columns = _reader(_reader(_reader(packed, c10d.all_reduce_.default), c10d.wait_tensor.default), aten.reshape.default)
    rows, pieces = packed.args[0], list(columns.users) if columns else []
    if len(rows) != len(pieces) or any(row.target is not aten.reshape.default for row in rows):
        return []
    found = []
    for row, piece in zip(rows, sorted(pieces, key=lambda piece: piece.args[2])):
        reduced = _reader(piece, aten.reshape.default)
        if piece.target is not aten.slice.Tensor or reduced is None or len(row.users) > 1:
            return []
        found.append(_Member(row, piece, reduced))
    return found if all(member.is_whole for member in found) else []


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
    columns = operand(members[0].piece)
    for m in members:
        with graph.inserting_before(m.made if m.is_product else packed):
            strides = [math.prod(m.shape[i + 1 :]) for i in range(len(m.shape))]
            view = graph.call_function(aten.as_strided.default, (bucket, m.shape, strides, m.piece.args[2]))
            if m.is_product:
                graph.call_function(aten.mm.out, m.made.args, {"out": view})
            else:
                graph.call_function(aten.copy_.default, (view, m.made))
        m.reduced.replace_all_uses_with(view)
        graph.erase_node(m.reduced)
        graph.erase_node(m.piece)
    graph.erase_node(columns)
    packed.replace_all_uses_with(bucket)
    graph.erase_node(packed)
    for m in members:
        is_product, made = m.is_product, m.made
        graph.erase_node(m.row)
        if is_product:
            graph.erase_node(made)
