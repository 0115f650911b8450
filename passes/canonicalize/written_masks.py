"""Say what attention that is written out adds to its scores, or fills them with, as the canonical attention says it.

A softmax attends to all keys alike where a lowest number closes all of a query's keys, which sdpa's masks do not do. So
a causal mask, a window or documents are taken out of what is added only where every query is known to keep a key; or
where sinks take all of such a query's weights. What an input of the call closes stays numbers that are added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from ..._torch import op_name, storage_key
from ..._torch.regions import written
from ...ir.graph import call, operand, tensor_arguments
from .attention_mask import Mask, constant_mask, simplify, together
from .bands import OPEN, band_of, joined
from .constant_values import Write, constant_value, one_sample

aten = torch.ops.aten
CLOSES = -1e9  # a weight is zero where so little is added to its score


@dataclass(frozen=True)
class Fill:
    """Scores become `value` where `condition` is true, or else where it is false (`keeps`)."""

    condition: fx.Node
    keeps: bool
    value: float


@dataclass(frozen=True)
class Said:
    """Holds what masks say, in arguments of the canonical attention; and `open_rows` (..., s, 1), whether a key of a
    query is open: others have no part in their scores."""

    mask: fx.Node | None
    causal: bool
    documents: fx.Node | None = None
    as_softmax: bool = False
    open_rows: fx.Node | None = None
    window: int = 0


@dataclass
class _Terms:
    """Collects what is added. `keeps`: constants that say which keys stay; `masks`: what conditions say that are none;
    `numbers`: all else that is added; `is_unsafe`: whether something may close all keys of a query; `closes`: whether
    something is known to close keys."""

    keeps: list[torch.Tensor] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    numbers: list[fx.Node] = field(default_factory=list)
    is_unsafe: bool = False
    closes: bool = False


@dataclass(frozen=True)
class Masks:
    """Reads what is `added` to scores and the `fills` of them, before `node`, which is the attention's output. `dtype`:
    of the queries."""

    graph_module: fx.GraphModule
    node: fx.Node
    added: Sequence[fx.Node]
    fills: Sequence[Fill]
    has_sinks: bool
    dtype: torch.dtype

    def said(self) -> Said | None:
        """Return what they say, None if the canonical attention does not say it. Equal ones are made once."""
        known = self.graph_module.__dict__.setdefault("_autopar_written_masks", {})
        key = tuple(self.added), tuple(self.fills), self.has_sinks, self.dtype, len(self._writes)
        if key not in known:
            known[key] = self._said()
        return known[key]

    @property
    def _writes(self) -> list[Write]:
        nodes = list(self.node.graph.nodes)
        before = nodes[: nodes.index(self.node)]
        return [(n, storage_key(into.meta["val"])) for n in before for into in written(n)]

    def _said(self) -> Said | None:
        writes, terms = self._writes, _Terms()
        for node in self.added:
            for term in _summands(node):
                self._add(terms, term, writes)
        filled = _Terms()
        for fill in self.fills:
            if fill.value > CLOSES:
                return None
            self._fill(filled, fill, writes)
        keep = _joint([*terms.keeps, *filled.keeps])
        others_close = any(m.causal or m.window or m.documents is not None for m in (*terms.masks, *filled.masks))
        if keep is not None and not self.has_sinks and not _keeps_one(keep, others_close):
            return None
        if self.has_sinks or not (terms.is_unsafe or filled.is_unsafe):
            return self._apart(terms, filled, keep)
        if not self.fills:
            return self._numbers(self._sum(self.added), True)
        return None if terms.is_unsafe or terms.closes else self._filled(terms, keep)

    def _add(self, terms: _Terms, term: fx.Node, writes: list[Write]) -> None:
        """Find out what a tensor that is added says."""
        value = constant_value(self.graph_module, term, writes)
        if value is not None:
            value = one_sample(value) if value.dim() == 4 else value
            closed = value <= CLOSES
            terms.closes |= bool(closed.any())
            terms.keeps += [~closed] if closed.any() else []
            rest = value.masked_fill(closed, 0.0)
            if rest.any():
                terms.numbers.append(constant_mask(self.graph_module, rest) if closed.any() else term)
        elif (closing := _closing(term)) is not None:
            condition, numbers = closing
            terms.closes = True
            keep = constant_value(self.graph_module, condition, writes)
            if keep is None:
                found = simplify(self.graph_module, self.node, condition, False)
                terms.masks.append(found)
                terms.is_unsafe |= found.left is not None
            else:
                terms.keeps.append(one_sample(keep) if keep.dim() == 4 else keep)
            for part in _summands(numbers):
                self._add(terms, part, writes)
        else:
            terms.numbers.append(term)
            terms.is_unsafe |= not is_learned(self.graph_module, term) or _has_lowest(term)

    def _fill(self, terms: _Terms, fill: Fill, writes: list[Write]) -> None:
        value = constant_value(self.graph_module, fill.condition, writes)
        if value is not None:
            value = (one_sample(value) if value.dim() == 4 else value).bool()
            terms.keeps.append(value if fill.keeps else ~value)
            return
        found = simplify(self.graph_module, self.node, self._kept(fill), False)
        terms.masks.append(found)
        terms.is_unsafe |= found.left is not None and fill.value > -math.inf

    def _apart(self, terms: _Terms, filled: _Terms, keep: torch.Tensor | None) -> Said | None:
        """Return what is said where every query keeps a key, or sinks take the weights of one that does not."""
        masks = [*terms.masks, *filled.masks]
        own = OPEN if keep is None else band_of(keep)
        band = joined([own or OPEN, *(m.band for m in masks)])
        if not band.is_said:
            own, band = None, joined(m.band for m in masks)
        open_ = [m.left for m in masks if m.left is not None]
        open_ += [constant_mask(self.graph_module, keep)] if keep is not None and own is None else []
        documents = [m.documents for m in masks if m.documents is not None]
        has_learned = any(is_learned(self.graph_module, n) for n in terms.numbers)
        if len(set(documents)) > 1 or documents and has_learned:
            return None
        closed = together(self.node, open_)
        if not terms.numbers:
            return Said(closed, band.causal, documents[0] if documents else None, window=band.window)
        said = self._numbers(self._sum(terms.numbers), False)
        if said is None or said.mask is None:
            return None
        mask = said.mask if closed is None else self._where(closed, said.mask, -math.inf)
        return Said(mask, band.causal, documents[0] if documents else None, window=band.window)

    def _filled(self, terms: _Terms, keep: torch.Tensor | None) -> Said | None:
        """Return what is said where fills may close all keys of a query, which then reads the values alone."""
        conditions = [self._kept(fill) for fill in self.fills]
        open_ = together(self.node, conditions)
        said = self._numbers(self._sum(terms.numbers), True) if terms.numbers else Said(None, False)
        if open_ is None or said is None:
            return None
        number = said.mask or self._made(aten.new_zeros.default, open_, [], dtype=self.dtype)
        mask = self._where(open_, number, torch.finfo(self.dtype).min)
        return Said(mask, False, None, True, self._made(aten.any.dim, open_, -1, True))

    def _numbers(self, mask: fx.Node, as_softmax: bool) -> Said | None:
        """Return what is said by numbers that are added; None for a wider type than the queries', which kernels would
        round."""
        dtype = mask.meta["val"].dtype
        if dtype != self.dtype:
            if torch.promote_types(dtype, self.dtype) != self.dtype:
                return None
            mask = self._made(aten.to.dtype, mask, self.dtype)
        return Said(mask, False, None, as_softmax)

    def _sum(self, nodes: Sequence[fx.Node]) -> fx.Node:
        total = nodes[0]
        for node in nodes[1:]:
            total = self._made(aten.add.Tensor, total, node)
        return total

    def _kept(self, fill: Fill) -> fx.Node:
        """Return what is true where scores stay."""
        if fill.keeps:
            return fill.condition
        if op_name(fill.condition.target) in ("logical_not", "bitwise_not"):
            return operand(fill.condition)
        if fill.condition.target is aten.eq.Scalar and fill.condition.args[1] == 0:
            before = operand(fill.condition)
            return before if before.meta["val"].dtype == torch.bool else self._made(aten.ne.Scalar, before, 0)
        return self._made(aten.logical_not.default, fill.condition)

    def _where(self, condition: fx.Node, numbers: fx.Node, other: float) -> fx.Node:
        return self._made(aten.where.ScalarOther, condition, numbers, other)

    def _made(self, target, *args, **kwargs) -> fx.Node:
        """Add an op with its fake value."""
        made = call(self.node, target, *args, **kwargs)
        real, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        made.meta["val"] = target(*real, **named)
        return made


def is_learned(graph_module: fx.GraphModule, mask: fx.Node) -> bool:
    """Return whether a tensor is made of parameters, among others."""
    parameters = {name for name, _ in graph_module.named_parameters(remove_duplicate=False)}
    return any(node.op == "get_attr" and node.target in parameters for node in _ancestors(mask))


def _has_lowest(node: fx.Node) -> bool:
    """Return whether a number that closes a key is among what a tensor is made of."""
    numbers = (a for n in _ancestors(node) for a in (*n.args, *n.kwargs.values()) if isinstance(a, float))
    return any(number <= CLOSES for number in numbers)


def _ancestors(node: fx.Node) -> set[fx.Node]:
    seen, stack = {node}, [node]
    while stack:
        new = [n for n in stack.pop().all_input_nodes if n not in seen]
        seen.update(new)
        stack += new
    return seen


def _summands(node: fx.Node) -> list[fx.Node]:
    """Return tensors whose sum, broadcast, is a tensor."""
    while node.target in (aten.contiguous.default, aten.clone.default):
        node = operand(node)
    pair = tensor_arguments(node)
    if node.target is aten.add.Tensor and len(pair) == 2 and not node.kwargs and len(node.args) == 2:
        return [term for side in pair for term in _summands(side)]
    return [node]


def _closing(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the condition of a tensor that closes keys where it is false, and the numbers where it is true."""
    if node.target is not aten.where.ScalarOther:
        return None
    sides, other = tensor_arguments(node), node.args[2]
    is_closing = isinstance(other, (int, float)) and other <= CLOSES
    return (sides[0], sides[1]) if is_closing and len(sides) == 2 else None


def _keeps_one(keep: torch.Tensor, others_close: bool) -> bool:
    """Return whether every query keeps a key; its own, if other masks, which keep that, close some as well."""
    if not others_close:
        return bool(keep.any(-1).all())
    return keep.shape[-1] == keep.shape[-2] and bool(keep.diagonal(0, -2, -1).all())


def _joint(keeps: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the conjunction, None of none."""
    joint = None
    for keep in keeps:
        joint = keep if joint is None else joint & keep
    return joint
