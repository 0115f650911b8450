"""Find the ops that quantize a weight to FP8, which may run where its shards are, so that codes are gathered.

Blocks are quantized from a parameter alone: their gathers travel in buckets, ahead of compute, as those of parameters
do. Codes by tensor wait for the largest value of all shards, and are gathered where they are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ...ops import autopar

if TYPE_CHECKING:
    from .vertices import Vertex

IN_BLOCKS = autopar.fp8_blocks.default
QUANTIZERS = {IN_BLOCKS, autopar.fp8_amax.default, autopar.fp8_tensor.default}


def mark_weight_codes(vertices: Sequence[Vertex]) -> None:
    """Set `quantizes_weight` of the vertices, in the order of the graph, that quantize a parameter or transpose one for
    that."""
    for v in vertices:
        if v.kind != "op" or not v.inputs:
            continue
        source = vertices[v.inputs[0][0]]
        is_view = v.node.target is torch.ops.aten.t.default and all(u.target in QUANTIZERS for u in v.node.users)
        is_of_weight = source.kind == "parameter" or source.quantizes_weight
        v.quantizes_weight = is_of_weight and (is_view or v.node.target in QUANTIZERS)


def is_gathered_ahead(v: Vertex) -> bool:
    """Return whether gathers of a vertex's tensors wait for nothing but a parameter."""
    return v.kind == "parameter" or v.quantizes_weight and v.node.target is IN_BLOCKS
