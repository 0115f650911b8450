"""Attention some queries at a time, with what lies before and behind it, as one op each in the forward and backward.

    out, lse        = queries_in_pieces("t0 = autopar.linear.default(r0, w0); ...", [source, cos], dims, [weight, k, v])
    dx, dw, dk, dv  = queries_in_pieces("...", [source, gradient, out, lse, cos], dims, [weights, k, v])

The backward's program starts with the ops of the forward whose tensors it reads; autopar/ops/query_pieces.py runs both.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

import torch
from torch import fx

from ...errors import VerifyError
from ...ir.graph import describe, operand
from ...ops import ATTENTION, autopar
from ...rules.query_regions import WHOLE, QueryRegion, attention_rows, query_regions
from ...rules.reading import bound
from .emit import Builder
from .join_ranges import Ranges, join_ranges
from .replace import move_before, origin, replace
from .tile_rows import Written, text_of

aten = torch.ops.aten
SIZED = (aten.reshape.default, aten.expand.default)  # which say the sizes of what they give


def tile_queries(graph: fx.Graph, names: Collection[str], alone: bool = False) -> None:
    """Rewrite a local joint graph in place; `names`: of the attentions, where the graph has them; `alone`: with nothing
    besides. What was there is left without readers. Raises VerifyError if the backward of one reads other queries."""
    ranges = join_ranges(graph, names)
    attentions = [
        node for node in graph.nodes if node.target is autopar.attention.default and _name(node, ranges) in names
    ]
    if missing := set(names) - {_name(node, ranges) for node in attentions}:
        raise VerifyError(f"no attention {', '.join(sorted(missing))} is in the local graph, which is to run in pieces")
    regions = {region.node: region for region in query_regions(graph, alone)} if attentions else {}
    for node in attentions:
        if node not in regions:
            message = f"a redistribution parts {node.name} from its backward, which are to run in pieces"
            raise VerifyError(message, node=describe(node))
        _tile(graph, regions[node], ranges)


def _name(node: fx.Node, ranges: Ranges) -> str:
    """Return the name of an attention in the joint graph."""
    return str(node.meta["part_of"]) if node in ranges else node.name


def _tile(graph: fx.Graph, region: QueryRegion, ranges: Ranges) -> None:
    """Put one op in the place of a region's forward, and one in that of its backward, where the attention's own is."""
    builder = Builder(graph, operand(region.node).meta["val"].fake_mode)
    backward = (*region.again, *region.backward)
    for nodes, gives, place in (
        (backward, (region.results, region.sums), region.attention_bw),
        (region.forward, (region.given, ()), region.node),
    ):
        for argument in (x for read in region.read(nodes) for x in read):
            move_before(place, argument)
        with graph.inserting_before(place):
            _put(builder, region, tuple(dict.fromkeys((*nodes, *gives[0]))), gives, place, ranges)


Nodes = Sequence[fx.Node]


def _put(
    builder: Builder,
    region: QueryRegion,
    ops: Nodes,
    gives: tuple[Nodes, Nodes],
    of: fx.Node,
    ranges: Ranges,
) -> None:
    """Add an op that computes `ops` in pieces, and let it give what they gave, rows and sums over them."""
    rows, whole = reads = region.read(ops)
    dims = [region.dims.get(x, DIM) for x in (*rows, *gives[0])]
    names = {node: Written(f"w{i}") for i, node in enumerate(whole)}

    def given(node: fx.Node) -> tuple[object, Sequence[object]]:
        return _in_piece(node, region.dims.get(node), names)

    name = _name(of, ranges)
    builder.meta = origin(of) | {"part_of": name}
    text = text_of(ops, reads, gives, given)
    arguments = text, list(rows), dims, list(whole), list(ranges[of]) if of in ranges else None
    made = builder.call(autopar.queries_in_pieces.default, *arguments, name=f"{name}_in_pieces")
    for i, node in enumerate((*gives[0], *gives[1])):
        builder.meta = {}
        replace_by = builder.call(operator.getitem, made, i)
        replace(node, replace_by)
        replace_by.meta["part_of"] = name  # which is what a plan computes again, or not


DIM = 2  # of queries in what an attention gives


def _in_piece(node: fx.Node, dim: int | None, whole: dict[fx.Node, Written]) -> tuple[object, Sequence[object]]:
    """Return an op and its arguments for any number of queries, from any place on."""
    if node.target in SIZED and dim is not None:
        sizes = list(node.meta["val"].shape)
        return node.target, (node.args[0], [*sizes[:dim], -1, *sizes[dim + 1 :]])
    if node.target is aten.slice_backward.default:  # which says the sizes as well
        return aten.constant_pad_nd.default, (node.args[0], _padding(node))
    if node.target not in ATTENTION:
        return node.target, node.args
    given, rows = bound(node), attention_rows(node)
    own = {name: whole[x] if x in whole and (name in WHOLE or x not in rows) else x for name, x in given.items()}
    if given["causal"] or given["window"]:
        own["first"] = Written(f"place(1, {given['first']})")
    if given["state"] is not None:
        own["start"] = Written(f"place({given['strides'][2]}, {given['start']})")
    return node.target, list(own.values())


def _padding(node: fx.Node) -> list[int]:
    """Return what the gradient of a slice puts before and behind that of a part, the last dim first."""
    given, shape = bound(node), node.meta["val"].shape
    dim = given["dim"] % len(shape)
    before = given["start"] % shape[dim]
    behind = shape[dim] - before - operand(node).meta["val"].shape[dim]
    return [0, 0] * (len(shape) - 1 - dim) + [before, behind]
