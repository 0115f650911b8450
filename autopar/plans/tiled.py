"""Say in a plan which regions are computed in pieces, so that what is wide inside of them is never whole."""

from __future__ import annotations

from dataclasses import dataclass

QUERIES, ATTENTION = "queries", "attention"  # an attention with the projection of its queries, and by itself


@dataclass(frozen=True)
class TiledRegion:
    """A region in pieces: the name of the op in the graph by which it is known, and of its module; `bytes_` of tensors
    that a device does not hold, `seconds` of a step that it takes to make them again in the backward. `pieces`: of its
    rows; 0 for a last linear layer and its loss, whose logits are cut into blocks of rows and of the vocabulary.
    `kind`: of an attention, which is cut into pieces of its queries, one of the two above."""

    node: str
    layer: str
    bytes_: float
    seconds: float
    pieces: int = 0
    kind: str = ""

    @property
    def is_loss(self) -> bool:
        """Return whether the region is a loss with the layer before it."""
        return self.pieces == 0

    @property
    def is_of_rows(self) -> bool:
        """Return whether the region is row-wise ops."""
        return not self.is_loss and not self.kind
