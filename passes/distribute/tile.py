"""Regions in pieces, so that what is wide inside of them is never whole: MLPs, attention, the last layer and loss.

    a region of row-wise ops    tile_rows.py, some rows at a time
    attention                   tile_queries.py, some queries at a time
    linear layer and loss       tile_loss.py, some rows and some of the vocabulary at a time

The backward of a region reads what the forward read and makes the rest again. It reads the forward's own copies of
weights and rows: what of these is not kept the pass `recompute`, which follows, makes again in the backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ...plans.tiled import ATTENTION, QUERIES, TiledRegion
from .tile_loss import tile_loss
from .tile_queries import tile_queries
from .tile_rows import tile_rows


def tile(local: fx.GraphModule, regions: Sequence[TiledRegion]) -> fx.GraphModule:
    """Rewrite a local joint graph in place. Raises VerifyError for a region that is none in the local graph, where a
    redistribution parts it."""
    graph = local.graph
    tile_rows(graph, [region.node for region in regions if region.is_of_rows])
    tile_loss(graph, [region.node for region in regions if region.is_loss])
    tile_queries(graph, [region.node for region in regions if region.kind == QUERIES])
    tile_queries(graph, [region.node for region in regions if region.kind == ATTENTION], alone=True)
    graph.eliminate_dead_code()
    graph.lint()
    local.recompile()
    return local
