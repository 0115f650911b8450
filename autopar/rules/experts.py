"""Rules of products of rows with the matrix of their expert, and of where rows go to their experts and back.

An axis may cut such a product in three ways: into blocks of rows (`r`, all experts everywhere), by expert with all rows
everywhere (`g`, the result is Partial) and by expert with each row where its expert is (`e`). Rows get there from
blocks by an all-to-all (`a`), or each device picks its own of all rows and adds up what it makes of them (`b`). Of a
token with several experts on a device one row may go there, and their sum come back (`c`).
"""

from __future__ import annotations

from torch import fx

from ..ir.graph import tensor_arguments
from ..ops import autopar
from .families import sets
from .rule import Dim, Rows, Rule

LINEAR = sets(([0], [1]))
ONCE = "c"
BLOCKS, OWNED = Rows("r"), (Rows("r"), Rows("e", by_owner=True))
BEFORE = BLOCKS, Rows("a"), Rows(ONCE)  # of tokens, and of the experts of their rows


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


def dispatch_tokens(node: fx.Node) -> Rule:
    """Return the rule of tokens of which each makes rows that go to their experts."""
    tokens, rows = _token_dims(node)
    even = _even(len(tensor_arguments(node)[0].meta["val"]))
    return Rule((tokens, (BEFORE,)), (rows,), even=even, apart=frozenset({ONCE}))


def combine_tokens(node: fx.Node) -> Rule:
    """Return the rule of rows on their way back to be added up in their tokens."""
    tokens, rows = _token_dims(node)
    even = _even(len(node.meta["val"]))
    return Rule((rows, (BEFORE,)), (tokens,), sets(([0],)), even=even, apart=frozenset({ONCE}))


def _token_dims(node: fx.Node) -> tuple[tuple[Dim, ...], tuple[Dim, ...]]:
    rest = tuple(f"d{i}" for i in range(1, node.meta["val"].dim()))
    owners = Rows("a", by_owner=True), Rows(ONCE, by_owner=True), Rows("b", by_owner=True, innermost=True)
    return (BEFORE, *rest), ((BLOCKS, *owners), *rest)


def _even(tokens: int) -> dict[str, int]:
    """Return that no factor cuts between the rows of a token."""
    return dict.fromkeys(("r", "a", ONCE), tokens)


def _way(node: fx.Node, before: Dim, after: Dim) -> tuple[tuple[tuple[Dim, ...], ...], tuple[tuple[Dim, ...], ...]]:
    rest = tuple(f"d{i}" for i in range(1, node.meta["val"].dim()))
    return ((before, *rest), ((BLOCKS, Rows("a")),)), ((after, *rest),)
