"""Rows that are copies of tokens, one for each of a token's experts, and sums of the rows of each token: how a mixture
of experts writes them, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import fx

from ...ir.graph import call, is_op, operand

aten = torch.ops.aten
CAST = aten._to_copy.default


@dataclass(frozen=True)
class Copied:
    """Rows (t * active, ...) that are copies of tokens (t, 1, ...), each `active` times."""

    stretched: fx.Node
    active: int

    def tokens(self, near: fx.Node) -> fx.Node:
        """Return the tokens (t, ...), added to the graph where they are not there."""
        if self.stretched.target is aten.unsqueeze.default and self.stretched.args[1] == 1:
            return operand(self.stretched)
        value = self.stretched.meta["val"]
        made = call(near, aten.squeeze.dim, self.stretched, 1)
        made.meta["val"] = value.squeeze(1)
        return made


def copied(value: fx.Node) -> Copied | None:
    """Return of which tokens a value's rows are copies; None if they are none."""
    if not is_op(value) or value.target is not aten.reshape.default:
        return None
    wide = operand(value)
    if not is_op(wide) or wide.target is not aten.expand.default:
        return None
    narrow, shape, rows = operand(wide).meta["val"].shape, wide.meta["val"].shape, value.meta["val"].shape
    is_stretched = len(narrow) == len(shape) == len(rows) + 1 and narrow[1] == 1 < shape[1]
    is_merged = is_stretched and narrow[0] == shape[0] and narrow[2:] == shape[2:] == rows[1:]
    return Copied(operand(wide), shape[1]) if is_merged and rows[0] == shape[0] * shape[1] else None


def narrowed(tokens: fx.Node) -> tuple[fx.Node, torch.dtype | None]:
    """Return what tokens were before a cast to a wider type, and that type; themselves and None if there was none."""
    if is_op(tokens) and tokens.target is CAST:
        before, wide = operand(tokens).meta["val"], tokens.meta["val"]
        if before.is_floating_point() and before.device == wide.device and before.dtype.itemsize < wide.dtype.itemsize:
            return operand(tokens), wide.dtype
    return tokens, None


def sums(reader: fx.Node, value: fx.Node) -> list[fx.Node]:
    """Return the sums of the rows of each token that are all that comes of a value by one of its readers; none if
    something else does."""
    if not is_op(reader):
        return []
    rows, shape = value.meta["val"].shape, reader.meta["val"].shape
    is_split = reader.target is aten.reshape.default and len(shape) == len(rows) + 1 and shape[2:] == rows[1:]
    if not is_split or shape[1] < 2 or not all(map(_is_sum, reader.users)):
        return []
    return list(reader.users)


def _is_sum(node: fx.Node) -> bool:
    if node.target is not aten.sum.dim_IntList or node.kwargs:
        return False
    return [d % 3 if d < 0 else d for d in cast(list[int], node.args[1])] == [1]
