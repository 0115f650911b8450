"""Find the documents that a mask keeps apart: integers of which those of a query and of a key are compared.

A mask that says `ids[b, q] == ids[b, k]` is found where libraries and users write it, with views, expansions and
lookups by arange in between: which elements of `ids` the two sides read is computed on their numbers in its stead.

Libraries tell documents by positions that start again, and compare positions where others compare places, for causal
masks and windows. Where `ids` counts the steps of positions that are not one, two positions of a document are as far
apart as their places: what compares such positions says the same of places, which are constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ..._torch import schema_names
from ...ir.graph import operand, tensor_arguments
from .constant_values import Write, constant_value

aten = torch.ops.aten
VIEWS = (
    aten.unsqueeze.default, aten.squeeze.dims, aten.squeeze.dim, aten.view.default, aten.reshape.default,
    aten.expand.default, aten.transpose.int, aten.permute.default, aten.slice.Tensor, aten.select.int,
    aten.index.Tensor, aten.contiguous.default, aten.clone.default, aten.alias.default, aten.detach.default,
)  # fmt: skip
CASTS = (aten.to.dtype_layout, aten.to.dtype, aten.to.device, aten._to_copy.default)
FILLED = (aten.new_ones.default, aten.new_zeros.default, aten.ones_like.default, aten.zeros_like.default)
COMPARISONS = {f"aten.{name}.Tensor" for name in ("le", "lt", "ge", "gt", "eq", "ne")}
QUERIES, KEYS = "queries", "keys"


@dataclass(frozen=True)
class Documents:
    """Holds integers `ids`, (b, s) or (s,), that the `factor` of a mask compares; `positions` that go up by one in
    each document, if `ids` was made of them."""

    graph_module: fx.GraphModule
    writes: list[Write]
    factor: fx.Node
    ids: fx.Node
    positions: fx.Node | None

    @property
    def places(self) -> dict[fx.Node, torch.Tensor]:
        """Return what may stand for the positions in a tensor that `is_relative`."""
        if self.positions is None:
            return {}
        shape = self.positions.meta["val"].shape
        return {self.positions: torch.arange(shape[-1]).expand(shape)}

    @property
    def is_one(self) -> bool:
        """Return whether every row is known to be one document, as where a library counts places that it made."""
        value = constant_value(self.graph_module, self.ids, self.writes)
        return value is not None and bool((value == value[..., :1]).all())

    def is_relative(self, node: fx.Node) -> bool:
        """Return whether a factor of the mask tells of the positions of a query and a key their distance alone."""
        return self.positions is not None and self._counted(node) == 0

    def _counted(self, node: fx.Node) -> int | None:
        """Return how often a tensor counts the position of its query or key, None if it does not only count it."""
        assert self.positions is not None
        if node.target in FILLED or not _depends(node, self.positions):
            return 0
        if self.positions in views_of(node):
            is_side = _side(self.graph_module, node, self.positions, self.writes) is not None
            return 1 if is_side and node.meta["val"].dim() == 4 else None
        if node.target in (*CASTS, aten.expand.default):
            return self._counted(operand(node))
        found = [self._counted(argument) for argument in tensor_arguments(node)]
        counts = [count for count in found if count is not None]
        if len(counts) < len(found):
            return None
        if node.target in (aten.add.Tensor, aten.sub.Tensor) and "alpha" not in node.kwargs:
            first, second = [*counts, 0][:2] if isinstance(node.args[0], fx.Node) else [0, *counts]
            return first + second if node.target is aten.add.Tensor else first - second
        if str(node.target) in COMPARISONS and counts[0] == counts[1]:
            return 0
        is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        return 0 if is_pointwise and not any(counts) else None


def documents_of(graph_module: fx.GraphModule, factors: Sequence[fx.Node], writes: list[Write]) -> Documents | None:
    """Return the documents that a factor of a mask keeps apart, if one does. `factors`: bool tensors that broadcast to
    (b, h, s, t), nothing of which is written to later."""
    for factor in factors:
        ids = _compared(graph_module, factor, writes)
        if ids is not None:
            return Documents(graph_module, writes, factor, ids, _positions(ids))
    return None


def _compared(graph_module: fx.GraphModule, factor: fx.Node, writes: list[Write]) -> fx.Node | None:
    """Return the integers of which a factor compares a query's with a key's."""
    equality = _equality(factor)
    if equality is None:
        return None
    sides = [views_of(side) for side in tensor_arguments(equality)]
    if len(sides) != 2:
        return None
    for ids in (node for node in sides[0] if node in sides[1] and "val" in node.meta):
        value = ids.meta["val"]
        if value.dim() in (1, 2) and not value.is_floating_point() and not value.is_complex():
            if {_side(graph_module, side[0], ids, writes) for side in sides} == {QUERIES, KEYS}:
                return ids
    return None


def _equality(factor: fx.Node) -> fx.Node | None:
    """Return the comparison that a factor is, its dims in their places."""
    node = factor
    while node.target is not aten.eq.Tensor:
        is_unsqueezed = node.target is aten.unsqueeze.default
        if not is_unsqueezed and node.target not in (*CASTS, aten.expand.default):
            return None
        value = operand(node).meta["val"]
        if value.dtype != torch.bool or is_unsqueezed and (value.dim() != 3 or node.args[1] not in (1, -3)):
            return None
        node = operand(node)
    shape = node.meta["val"].shape
    return node if len(shape) != 3 or shape[0] == 1 or factor.meta["val"].dim() == 4 else None


def views_of(node: fx.Node) -> list[fx.Node]:
    """Return a node and what it is a view of, or a lookup of some elements."""
    found = [node]
    while node.op == "call_function" and (node.target in VIEWS or node.target in CASTS and _keeps_type(node)):
        node = operand(node)
        found.append(node)
    return found


def _keeps_type(node: fx.Node) -> bool:
    return node.meta["val"].dtype == operand(node).meta["val"].dtype


def _side(graph_module: fx.GraphModule, node: fx.Node, ids: fx.Node, writes: list[Write]) -> str | None:
    """Return whose elements of `ids` a tensor has, for all keys or queries alike: QUERIES, in its second last dim, or
    KEYS, in its last."""
    shape = ids.meta["val"].shape
    numbers = torch.arange(shape.numel()).view(-1, shape[-1])
    found = constant_value(graph_module, node, writes, {ids: numbers.view(shape)})
    if found is None:
        return None
    samples, ndim = len(numbers), found.dim()
    if ndim == 1:
        return KEYS if samples == 1 and torch.equal(found, numbers[0]) else None
    leading = [samples] + [1] * (ndim - 3) if ndim > 2 else []
    if ndim == 2 and samples > 1:
        return None
    for side, dims in ((QUERIES, [shape[-1], 1]), (KEYS, [1, shape[-1]])):
        if _is_expanded(found, numbers.view(*leading, *dims)):
            return side
    return None


def _is_expanded(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Return whether a tensor has the values of another, of which it may repeat dims of size 1."""
    for dim, (size, own) in enumerate(zip(found.shape, wanted.shape, strict=True)):
        if size != own and own == 1 and found.stride(dim) == 0:
            found = found.narrow(dim, 0, 1)
    return torch.equal(found, wanted)


def _positions(ids: fx.Node) -> fx.Node | None:
    """Return the positions (b, s) whose steps other than one `ids` counts along a row."""
    while ids.target is aten.expand.default:
        ids = operand(ids)
    if ids.target is not aten.cumsum.default or not _is_last(ids.args[1], ids):
        return None
    steps = operand(ids)
    while steps.target in CASTS:
        steps = operand(steps)
    if steps.target is not aten.ne.Scalar or steps.args[1] != 1 or operand(steps).target is not aten.diff.default:
        return None
    diff = operand(steps)
    given = dict(zip(schema_names(diff.target), diff.args)) | dict(diff.kwargs)
    before, positions = given.get("prepend"), operand(diff)
    if given.get("n", 1) != 1 or not _is_last(given.get("dim", -1), diff) or given.get("append") is not None:
        return None
    return positions if isinstance(before, fx.Node) and before.meta["val"].shape[-1] == 1 else None


def _is_last(dim: object, node: fx.Node) -> bool:
    return dim in (-1, node.meta["val"].dim() - 1)


def _depends(node: fx.Node, on: fx.Node) -> bool:
    seen, stack = {node}, [node]
    while stack:
        if (found := stack.pop()) is on:
            return True
        new = [n for n in found.all_input_nodes if n not in seen]
        seen.update(new)
        stack += new
    return False
