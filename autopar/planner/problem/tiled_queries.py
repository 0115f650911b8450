"""The prices of attentions in pieces of their queries (autopar/rules/query_regions.py).

The backward makes the queries again, which counts as its compute. Every piece launches every op; what leaves a region
is written piece by piece. Each piece reads the keys and values that its queries attend to, and adds to their gradients,
which are there in a wide type till the last one has; each block of these keys adds to the gradient of a piece's queries
(autopar/ops/query_pieces.py). Of a causal attention a piece attends to half of the keys in the mean. Its products are
those of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import fx

from ...hardware.profile import Hardware
from ...ir.graph import bytes_of, tensor_arguments, tensor_of, values_of
from ...ir.layout import ZIGZAG, Layout, largest_local_numel, local_shape
from ...ops import query_pieces
from ...ops.attention_forms import lse_dtype
from ...ops.query_pieces_bytes import backward_bytes, forward_bytes
from ...plans.tiled import ATTENTION, QUERIES, TiledRegion
from ...rules import Strategy
from ...rules.layers import ring_axes
from ...rules.query_regions import QueryRegion, attention_rows, query_regions
from ...rules.reading import bound, tensors_by_name
from .problem import Problem
from .tiled_rows import fraction, standing_alone

if TYPE_CHECKING:
    from ..objective.evaluate import Evaluation


@dataclass(frozen=True)
class Local:
    """The form of a tensor on the device that holds most of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


LAUNCHES = 6  # of a block of keys: the kernels of a backward, and the sums


def long_regions(graph: fx.Graph, alone: bool = False) -> tuple[QueryRegion, ...]:
    """Return the regions of a graph that have more queries than a piece."""
    return tuple(r for r in query_regions(graph, alone) if query_pieces.pieces_of(r.queries) > 1)


def regions(problem: Problem, alone: bool) -> tuple[QueryRegion, ...]:
    """Return the regions of a problem that stand alone; `alone` in another sense: without projections."""
    return standing_alone(problem, long_regions(problem.graph, alone))


def price(problem: Problem, hardware: Hardware) -> None:
    """Add to the seconds of the ops of a problem's regions what pieces take more, and let no keys of an attention go
    round: a piece has all of them."""
    where = {v.node: v for v in problem.vertices if v.kind == "op"}
    priced = set()
    for region in problem.tiled_queries:
        for node in region.ops:
            cls = where[node].cls
            if cls in priced:
                continue
            priced.add(cls)
            options = problem.classes[cls]
            more = [_more_seconds(problem, hardware, region, node, s) for s in options.strategies]
            problem.classes[cls] = replace(options, seconds=options.seconds + np.array(more))
            if node in (region.node, region.attention_bw):
                stays = np.array([not ring_axes(node, s.inputs) for s in options.strategies])
                problem.fits[cls] = problem.fits.get(cls, True) & stays


def _local(problem: Problem, shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    return local_shape(shape, layout, problem.mesh, dict.fromkeys(problem.mesh.names, 0))


def _pieces(problem: Problem, shape: tuple[int, ...], layout: Layout, dim: int) -> tuple[int, int]:
    """Return how many queries a device has of a tensor, and in how many pieces: of two ranges if it has two."""
    queries = _local(problem, shape, layout)[dim]
    if layout.parts[dim] == ZIGZAG:
        return queries, 2 * query_pieces.pieces_of(-(-queries // 2))
    return queries, query_pieces.pieces_of(queries)


def _more_seconds(
    problem: Problem, hardware: Hardware, region: QueryRegion, node: fx.Node, strategy: Strategy
) -> float:
    """Return the seconds that an op of a region takes more under a strategy for running piece by piece."""
    is_attention = node in (region.node, region.attention_bw)
    dims = attention_rows(node) if is_attention else region.dims
    read = tensor_arguments(node)
    at, argument = next((i, a) for i, a in enumerate(read) if a in dims)
    _, count = _pieces(problem, tuple(argument.meta["val"].shape), strategy.inputs[at], dims[argument])
    if count == 1:
        return 0.0
    held = [
        largest_local_numel(value.shape, layout, problem.mesh) * value.element_size()
        for value, layout in zip(values_of(node), strategy.outputs)
    ]
    launches, moved = count - 1.0, 0.0
    if node is region.attention_bw:
        blocks, moved = _of_backward(problem, node, strategy, count, held)
        launches = LAUNCHES * blocks
    elif node is region.node:
        moved = 2.0 * held[0]
    elif node in region.sums:
        moved = 2.0 * (count - 1) * held[0]
    elif node in region.results:
        moved = 2.0 * held[0]
    return launches * hardware.launch_seconds + moved / hardware.reached_memory_bytes_per_second


def _of_backward(
    problem: Problem, node: fx.Node, strategy: Strategy, count: int, held: list[int]
) -> tuple[float, float]:
    """Return the blocks of keys of all pieces, and the bytes that their sums move: a block's gradients are written and
    read, sums are read and written in the wide type, of keys once a piece, of queries once a block."""
    names, given = tensors_by_name(node), bound(node)
    at = names.index("k")
    keys = _local(problem, tuple(given["k"].meta["val"].shape), strategy.inputs[at])[2]
    item = given["q"].meta["val"].dtype.itemsize
    share = (1 + 1 / count) / 2 if given["causal"] else 1.0
    wide = 2 * (lse_dtype(given["q"].meta["val"].dtype).itemsize / item + 1)
    blocks = count * max(1.0, share * keys / query_pieces.MOST_KEYS)
    of_queries, of_keys = held[0] * blocks / count, (held[1] + held[2]) * count * share
    return blocks, wide * (of_queries + of_keys)


def share_of_piece(problem: Problem, vertex: int, output: int, layout: Layout) -> float:
    """Return the part of a tensor inside of a region that is there at a time."""
    shape = tuple(problem.vertices[vertex].values[output].shape)
    queries, count = _pieces(problem, shape, layout, problem.query_dims[vertex, output])
    return -(-queries // count) / queries if queries else 1.0


def bytes_of_piece(problem: Problem, node: fx.Node, strategy: Strategy) -> int:
    """Return the bytes that an attention of a region allocates beside what it reads and gives; what kernels allocate,
    for GPUs alone."""
    named, given = tensors_by_name(node), dict(bound(node))
    rows = attention_rows(node)
    at = named.index("q")
    _, count = _pieces(problem, tuple(given["q"].meta["val"].shape), strategy.inputs[at], 2)
    cut = {name: rows[given[name]] for name in named if name not in ("k", "v", "key_documents") and given[name] in rows}
    for name, layout in zip(named, strategy.inputs):
        value = given[name].meta["val"]
        given[name] = Local(_local(problem, tuple(value.shape), layout), value.dtype)
    queries = -(-given["q"].shape[2] // count)
    is_backward = "grad" in given
    return (backward_bytes if is_backward else forward_bytes)(node.target, given, cut, queries, problem.is_for_gpus)


def described(problem: Problem, evaluation: Evaluation) -> tuple[TiledRegion, ...]:
    """Return what a plan says of each region: `bytes_` of what of the forward would wait for its backward."""
    where, found = {v.node: v.index for v in problem.vertices if v.kind == "op"}, []

    def chosen(node: fx.Node) -> Strategy:
        return problem.choices(where[node]).strategies[evaluation.choice[where[node]]]

    for region in problem.tiled_queries:
        read = [n for n in region.again if any(user in region.backward for user in n.users)]
        made = [(n, *tensor_of(n)) for n in read]
        bytes_ = [bytes_of(n.meta["val"]) * fraction(problem, n, chosen(op).outputs[i]) for n, op, i in made]
        again = [where[n] for n in region.again if n in where]
        seconds = sum(float(problem.choices(v).seconds[evaluation.choice[v]]) for v in again)
        shape = tuple(tensor_arguments(region.node)[0].meta["val"].shape)
        _, count = _pieces(problem, shape, chosen(region.node).inputs[0], 2)
        kind = ATTENTION if region.alone else QUERIES
        found.append(TiledRegion(region.node.name, region.module, sum(bytes_), seconds, count, kind))
    return tuple(found)
