"""Regions of row-wise ops some rows at a time, as one op each in the forward and in the backward.

    end        = in_pieces("t0 = autopar.linear.default(r0, w0); ...", [source], [weights])
    dx, dw...  = in_pieces("...", [source, gradient of the end], [weights])

The backward's program starts with the ops of the forward whose tensors it reads (autopar/ops/row_pieces.py runs both).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence

import torch
from torch import fx

from ...errors import VerifyError
from ...ir.graph import describe
from ...ops import ATTENTION, autopar
from ...rules.row_regions import RowRegion, row_regions
from ...rules.row_wise import rows_read
from .emit import Builder
from .replace import move_before, origin, replace

aten = torch.ops.aten
KEPT: dict[object, tuple[str, ...]] = {
    aten._to_copy.default: ("dtype",),
    **dict.fromkeys(ATTENTION, ()),
}  # keywords that a program keeps, of ops with others that say what is so anyway


def tile_rows(graph: fx.Graph, names: Collection[str]) -> None:
    """Rewrite a local joint graph in place; `names`: of the ops that end regions, where the graph has them. What was
    there is left without readers. Raises VerifyError if one ends no region in the local graph."""
    ends = [node for node in graph.nodes if node.name in names]
    regions = {region.node: region for region in row_regions(graph)} if ends else {}
    for end in ends:
        if end not in regions:
            message = f"a redistribution parts the ops that end with {end.name}, which are to run in pieces"
            raise VerifyError(message, node=describe(end))
        _tile(graph, regions[end])


def _tile(graph: fx.Graph, region: RowRegion) -> None:
    """Put one op in the place of a region's forward, and one in that of its backward."""
    builder = Builder(graph, region.node.meta["val"].fake_mode)
    late, early = region.node, region.backward[0]
    backward = (*region.again, *region.backward)
    rows, whole = _read(backward)
    for argument in (*rows, *whole):
        move_before(early, argument)
    with graph.inserting_before(early):
        results = region.results
        _put(builder, backward, (rows, whole), (results, region.sums), early)
    with graph.inserting_before(late):
        _put(builder, region.forward, _read(region.forward), ((late,), ()), late)


Nodes = Sequence[fx.Node]


def _put(builder: Builder, ops: Nodes, reads: tuple[Nodes, Nodes], gives: tuple[Nodes, Nodes], of: fx.Node) -> None:
    """Add an op that computes `ops` in pieces, and let it give what they gave. `reads`: rows and what is read whole;
    `gives`: rows and sums over them."""
    builder.meta = origin(of) | {"part_of": of.name}
    made = builder.call(
        autopar.in_pieces.default, text_of(ops, reads, gives), *map(list, reads), name=f"{of.name}_in_pieces"
    )
    for i, node in enumerate((*gives[0], *gives[1])):
        builder.meta = {}
        given = builder.call(operator.getitem, made, i)
        replace(node, given)
        given.meta["part_of"] = of.name  # which is what a plan computes again, or not


def _read(ops: Nodes) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the rows that ops read from outside, and what they read whole, each once and in order."""
    rows: dict[fx.Node, None] = {}
    whole: dict[fx.Node, None] = {}
    for node in ops:
        own = rows_read(node)
        for argument in node.all_input_nodes:
            if argument not in ops:
                (rows if argument in own else whole)[argument] = None
    return list(rows), list(whole)


def _widened(node: fx.Node) -> list[int]:
    """Return the sizes of an expand of rows, for any number of rows."""
    *rows, columns = node.meta["val"].shape
    return [-1 for _ in rows] + [columns]


class Written(str):
    """An argument as a program has it."""


Given = Callable[[fx.Node], tuple[object, Sequence[object]]]


def _of_rows(node: fx.Node) -> tuple[object, Sequence[object]]:
    """Return an op and its arguments for any number of rows."""
    return node.target, (node.args[0], _widened(node)) if node.target is aten.expand.default else node.args


def text_of(ops: Nodes, reads: tuple[Nodes, Nodes], gives: tuple[Nodes, Nodes], given: Given = _of_rows) -> str:
    """Return the program of `ops`, whose arguments and results have the names of their places; `given`: an op in a
    piece, and its arguments."""
    names = {node: f"{kind}{i}" for kind, nodes in zip("wrt", (*reads[::-1], ops)) for i, node in enumerate(nodes)}

    def written(value: object) -> str:
        if isinstance(value, fx.Node):
            return names[value]
        if isinstance(value, Written):
            return str(value)
        return f"[{', '.join(map(written, value))}]" if isinstance(value, (list, tuple)) else repr(value)

    lines = []
    for node in ops:
        if node.target is operator.getitem:
            lines.append(f"{names[node]} = {written(node.args[0])}[{node.args[1]}]")
            continue
        (op, own), kept = given(node), KEPT.get(node.target, tuple(node.kwargs))
        arguments = [*map(written, own), *(f"{k}={written(node.kwargs[k])}" for k in kept if k in node.kwargs)]
        lines.append(f"{names[node]} = {op}({', '.join(arguments)})")
    rows, sums = ("".join(f"{names[node]}, " for node in nodes) for nodes in gives)
    return "; ".join([*lines, f"return ({rows}), ({sums})"])
