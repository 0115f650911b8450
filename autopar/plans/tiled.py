"""Say in a plan which losses are computed in blocks, without logits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TiledLoss:
    """A last linear layer and its loss in blocks: the name of the layer's op in the graph, and of its module; `bytes_`
    of logits that a device does not hold, `seconds` of a step that it takes to make them again in the backward."""

    node: str
    layer: str
    bytes_: float
    seconds: float
