"""Ops between the products of one expert: they take rows where dispatch left them and keep them there.

An op that treats rows alike, whatever their number, may be cut by the owner of the rows as well as into blocks.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from ..ops import autopar
from .localize import LOCAL
from .rule import Dim, Rows, Rule

aten = torch.ops.aten
DISPATCHES = {autopar.dispatch.default, autopar.dispatch_tokens.default}
WAYS = DISPATCHES | {autopar.combine.default, autopar.combine_tokens.default}
PRODUCTS = {autopar.grouped_mm.default, autopar.grouped_mm_dw.default}
# their local constants are of other dims than rows
KEEPS_ROWS = {
    aten.split.Tensor, aten.split_with_sizes.default, aten.slice.Tensor, aten.slice_backward.default,
    aten.slice_scatter.default,
}  # fmt: skip


def by_owner(node: fx.Node, rule: Rule, is_rows: list[bool]) -> Rule:
    """Return a rule under which the rows that an op takes may be where their experts are. `is_rows`: of each tensor
    argument whether its dim 0 is rows that were dispatched."""
    if node.target in WAYS | PRODUCTS:
        return rule
    factor = row_factor(node, rule, is_rows) if any(is_rows) else None
    if factor is None:
        return rule

    def owned(dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
        return ((Rows(factor), Rows("owner", by_owner=True)), *dims[1:]) if dims and dims[0] == factor else dims

    return replace(rule, inputs=tuple(map(owned, rule.inputs)), outputs=tuple(map(owned, rule.outputs)))


def row_factor(node: fx.Node, rule: Rule, is_rows: list[bool]) -> str | None:
    """Return the factor of the rows of an op, some of whose arguments are rows; None if it treats them differently."""
    if str(node.target) in LOCAL and node.target not in KEEPS_ROWS:
        return None
    found = {dims[0] if dims else None for dims, rows in zip(rule.inputs, is_rows) if rows}
    factor = found.pop()
    if found or not isinstance(factor, str) or factor in rule.even or rule.reduction != "sum":
        return None
    for dims, rows in [*zip(rule.inputs, is_rows), *((dims, True) for dims in rule.outputs)]:
        if any(_has(dim, factor) for dim in dims[1:]) or (dims and not rows and _has(dims[0], factor)):
            return None
    return factor


def _has(dim: Dim, factor: str) -> bool:
    return dim is not None and (dim == factor or isinstance(dim, tuple) and factor in dim)
