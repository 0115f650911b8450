"""Rules of products of rows with the matrix of their expert, and of where rows go to their experts and back.

An axis may cut such a product in three ways: into blocks of rows (`r`, all experts everywhere), by expert with all rows
everywhere (`g`, the result is Partial) and by expert with each row where its expert is (`e`). Rows get there from
blocks by an all-to-all (`a`), or each device picks its own of all rows and adds up what it makes of them (`b`).
"""

from __future__ import annotations

from torch import fx

from ..ops import autopar
from .families import sets
from .rule import Dim, Rows, Rule

LINEAR = sets(([0], [1]))
BLOCKS, OWNED = Rows("r"), (Rows("r"), Rows("e", by_owner=True))


def grouped(node: fx.Node) -> Rule:
    """Return the rule of a grouped product and of its gradient of the matrices."""
    contiguous = frozenset("ge")
    if node.target is autopar.grouped_mm.default:
        return Rule(((OWNED, "k"), (("g", "e"), "k", "n"), (OWNED,)), ((OWNED, "n"),), LINEAR, contiguous=contiguous)
    return Rule(((OWNED, "k"), (OWNED, "n"), (OWNED,)), ((("g", "e"), "k", "n"),), LINEAR, contiguous=contiguous)


def dispatch(node: fx.Node) -> Rule:
    """Return the rule of rows on their way to their experts."""
    return Rule(
        *_way(node, (BLOCKS, Rows("a")), (BLOCKS, Rows("a", by_owner=True), Rows("b", by_owner=True, innermost=True)))
    )


def combine(node: fx.Node) -> Rule:
    """Return the rule of rows on their way back."""
    inputs, outputs = _way(
        node, (BLOCKS, Rows("a", by_owner=True), Rows("b", by_owner=True, innermost=True)), (BLOCKS, Rows("a"))
    )
    return Rule(inputs, outputs, sets(([0],)))


def _way(node: fx.Node, before: Dim, after: Dim) -> tuple[tuple[tuple[Dim, ...], ...], tuple[tuple[Dim, ...], ...]]:
    rest = tuple(f"d{i}" for i in range(1, node.meta["val"].dim()))
    return ((before, *rest), ((BLOCKS, Rows("a")),)), ((after, *rest),)
