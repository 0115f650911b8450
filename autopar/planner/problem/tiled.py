"""The problem of a graph of which regions are computed in pieces, so that what is wide inside of them is never whole.

It has the vertices of the graph itself, at other prices. Tensors inside of a region are never redistributed and do not
wait for the backward, which makes them again; a step holds a piece of them at a time (tiled_loss.py, tiled_rows.py and
tiled_queries.py say what that is and what it costs; passes/distribute/tile.py is what then runs).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

from torch import fx

from ...hardware.profile import Hardware
from ...ir.graph import tensor_of
from ...ir.layout import Layout
from ...ops import ATTENTION as ATTENTIONS
from ...plans.tiled import ATTENTION, QUERIES, TiledRegion
from ...rules.loss_regions import LossRegion, loss_regions
from ...rules.query_regions import query_regions
from ...rules.row_regions import RowRegion, row_regions
from . import tiled_loss, tiled_queries, tiled_rows
from .multipliers import Prices
from .problem import Problem

if TYPE_CHECKING:
    from ..objective.evaluate import Evaluation

AUTO, NONE, LOSS, MLP = "auto", "none", "loss", "mlp"
ALL = (LOSS, MLP, QUERIES)
KINDS = {"+".join(kinds) or NONE: kinds for count in range(4) for kinds in combinations(ALL, count)}
TILINGS = (AUTO, *KINDS)
NEVER_BYTES = 2**44  # as whose redistribution that of a tensor inside of a region is priced: none is made


def with_tiles(
    problem: Problem, hardware: Hardware, kinds: Collection[str], makes_later: bool = True
) -> Problem | None:
    """Return the problem with all regions of these kinds in pieces, None if there is none of one of them; ATTENTION is
    QUERIES without the projections. Logits that leave the graph as an output are left to be made when they are read; if
    that cannot be (not `makes_later`), they are made."""
    found: tuple[LossRegion | RowRegion, ...] = ()
    for kind in sorted(kinds, key=(LOSS, QUERIES, ATTENTION, MLP).index):  # MLPs are what others leave
        some: tuple[LossRegion | RowRegion, ...]
        if kind == LOSS:
            some = tiled_loss.regions(problem, makes_later)
        elif kind == MLP:
            taken = {node for region in found if isinstance(region, RowRegion) for node in region.ops}
            some = tiled_rows.regions(problem, taken)
        else:
            some = tiled_queries.regions(problem, kind == ATTENTION)
        if not some:
            return None
        found += some
    vertex_of = {v.node: v.index for v in problem.vertices if v.kind == "op"}
    never = {
        (vertex_of[producer], output): NEVER_BYTES
        for region in found
        for producer, output in map(tensor_of, region.never_made)
    }
    tiled = replace(problem, tensor_bytes=problem.tensor_bytes | never, tiled=found)
    tiled.uses = [*problem.uses, *tiled.read_again()]
    tiled.classes, tiled.fits = dict(problem.classes), dict(problem.fits)
    tiled_loss.price(tiled, hardware)
    tiled_rows.price(tiled, hardware)
    tiled_queries.price(tiled, hardware)
    return tiled


def with_regions(tile: str, graph: fx.Graph) -> str:
    """Return of what is asked for in pieces what a graph has regions of: that of another call may have fewer."""
    found = {LOSS: loss_regions, MLP: tiled_rows.long_regions, QUERIES: tiled_queries.long_regions}
    return "+".join(kind for kind in KINDS[tile] if found[kind](graph)) or NONE if tile != AUTO else AUTO


def regions_named(graph: fx.Graph, nodes: Collection[fx.Node], alone: bool) -> tuple[LossRegion | RowRegion, ...]:
    """Return the regions of a graph that are known by these nodes; `alone`: attentions are without projections."""
    if not nodes:
        return ()
    found: tuple[LossRegion | RowRegion, ...] = (*loss_regions(graph), *row_regions(graph))
    if any(node.target in ATTENTIONS for node in nodes):
        found += query_regions(graph, alone)
    return tuple(region for region in found if region.node in nodes)


def share_of_piece(problem: Problem, vertex: int, output: int, layout: Layout) -> float:
    """Return the part of a tensor inside of a region of rows or queries that is there at a time."""
    if (vertex, output) in problem.query_dims:
        return tiled_queries.share_of_piece(problem, vertex, output, layout)
    return tiled_rows.share_of_piece(problem, vertex, output, layout)


def described(problem: Problem, evaluation: Evaluation, hardware: Hardware) -> tuple[TiledRegion, ...]:
    """Return what a plan says of the regions that it computes in pieces."""
    rows, queries = tiled_rows.described(problem, evaluation), tiled_queries.described(problem, evaluation)
    return tiled_loss.described(problem, evaluation, hardware) + rows + queries


def may_save(problem: Problem, hardware: Hardware, prices: Prices) -> bool:
    """Return whether tensors that wait for the backward may cost more at these prices than pieces of them do. If not, a
    bound of plans with whole tensors is one of plans in pieces too: these cost the same otherwise, or more. Those of
    rows are computed again where they cost more, in pieces or not."""
    return tiled_loss.may_save(problem, hardware, prices)


def moves_none(problem: Problem, evaluation: Evaluation) -> bool:
    """Return whether a plan moves nothing inside of a region, and all of one reads its rows in one layout."""
    if any((t.producer, t.output) in problem.never_made for t in evaluation.every_transfer):
        return False
    return tiled_rows.reads_alike(problem, evaluation)
