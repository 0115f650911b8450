"""Attention that a model writes out as products and a softmax -> `autopar::attention`.

    dropout(softmax(softcap * tanh(q k^T * scale / softcap) + masks | sinks)) v

What is found is read by written_scores.py, masks by written_masks.py. What is not found stays as it is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import fx

from ...ir.graph import call, operand
from .attention import before_repeat, canonical, dropped
from .written_masks import Masks, Said
from .written_scores import SOFTMAXES, VIEWS, Scores, drops_some, name_of, scores_of, shift_of, weights_of

aten = torch.ops.aten


def written_attention(graph_module: fx.GraphModule) -> None:
    """Replace every attention that is written out, in place."""
    for node in list(graph_module.graph.nodes):
        if node.op == "call_function" and node.target in SOFTMAXES:
            _rewrite(graph_module, node)


def _rewrite(graph_module: fx.GraphModule, softmax: fx.Node) -> None:
    read = scores_of(softmax)
    if read is None:
        return
    scores, path = read
    weights = weights_of(softmax, scores.sinks is not None)
    if weights is None:
        return
    last = weights[-1]
    with last.graph.inserting_before(last), fx.traceback.preserve_node_meta(), fx.traceback.set_current_meta(last):
        found = _Written(graph_module, scores, weights).attention()
    if found is not None:
        last.replace_all_uses_with(found)
        inside = {*path, *weights, *(n for step in path for n in shift_of(step))}
        for node in [n for n in reversed(last.graph.nodes) if n in inside]:
            node.graph.erase_node(node)


class _Written:
    """Builds the canonical attention of some scores in the place of the product with the values, the last of the nodes
    of their `weights`."""

    def __init__(self, graph_module: fx.GraphModule, scores: Scores, weights: Sequence[fx.Node]):
        self.graph_module, self.scores, self.last = graph_module, scores, weights[-1]
        self.dropout = next(filter(drops_some, weights), None)

    def attention(self) -> fx.Node | None:
        """Return the output in the form of the product; None if the op does not say this attention."""
        product = self.scores.product
        skipped = 1 if product.target is aten.baddbmm.default else 0
        query, turned, value = operand(product, skipped), operand(product, skipped + 1), operand(self.last, 1)
        heads = self._heads(query)
        if heads is None or {x.meta["val"].dim() for x in (query, turned, value)} - {3, 4}:
            return None
        q, k, v = (self._four(x, heads) for x in (query, self._turned(turned), value))
        k, v = self._grouped(k, v, q)
        if not _fit(q, k, v):
            return None
        sinks = None if self.scores.sinks is None else self._sinks(self.scores.sinks, heads[1])
        if sinks is None and self.scores.sinks is not None:
            return None
        said = self._said(heads, q)
        if said is None:
            return None
        if said.open_rows is not None:
            q = self._made(aten.where.ScalarOther, said.open_rows, q, 0.0)
        v = self._cast(v, q)
        cap = self.scores.softcap
        out = canonical(self.last, q, k, v, said, self.scores.scale * (cap or 1.0), sinks, cap, self._drops(q))
        out.meta["val"] = q.meta["val"].new_empty(*q.meta["val"].shape[:-1], v.meta["val"].shape[-1])
        out = self._cast(out, self.last)
        shape = self.last.meta["val"].shape
        return out if len(shape) == 4 else self._made(aten.reshape.default, out, list(shape))

    def _said(self, heads: tuple[int, int], q: fx.Node) -> Said | None:
        """Return what the masks say; None if that cannot be said, or a mask is not of scores (b, h, s, t)."""
        added = [self._mask(node, heads) for node in self.scores.added]
        conditions = [self._mask(fill.condition, heads) for fill in self.scores.fills]
        masks = [mask for mask in (*added, *conditions) if mask is not None and mask.meta["val"].dim() <= 4]
        if len(masks) < len(added) + len(conditions):
            return None
        fills = [replace(fill, condition=mask) for fill, mask in zip(self.scores.fills, masks[len(added) :])]
        has_sinks, dtype = self.scores.sinks is not None, q.meta["val"].dtype
        return Masks(self.graph_module, self.last, masks[: len(added)], fills, has_sinks, dtype).said()

    def _drops(self, q: fx.Node) -> tuple:
        """Return the arguments by which weights are dropped. Where the column of a sink is still among them, those of
        the next row follow behind it."""
        if self.dropout is None:
            return ()
        shape = *q.meta["val"].shape[:-1], self.dropout.meta["val"].shape[-1]
        return dropped(self.graph_module, self.last, cast(float, self.dropout.args[1]), shape)

    def _mask(self, node: fx.Node, heads: tuple[int, int]) -> fx.Node | None:
        """Return what is added to scores of three dims, samples and heads in one, as it is added to those of four."""
        shape = node.meta["val"].shape
        if len(shape) != 3 or shape[0] == 1:
            return node
        if shape[0] != heads[0] * heads[1]:
            return node if shape[0] == heads[1] else None
        return self._made(aten.reshape.default, node, [*heads, *shape[1:]])

    def _heads(self, query: fx.Node) -> tuple[int, int] | None:
        """Return the numbers of samples and of heads of the queries."""
        shape = tuple(query.meta["val"].shape)
        if len(shape) == 4:
            return shape[:2]
        if not self.scores.shape and name_of(query) in VIEWS:
            source = tuple(operand(query).meta["val"].shape)
            return source[:2] if len(source) == 4 and source[2:] == shape[1:] else None
        return (self.scores.shape[0], self.scores.shape[1]) if self.scores.shape else None

    def _four(self, x: fx.Node, heads: tuple[int, int]) -> fx.Node:
        """Return a tensor (b, h, s, d), of one that has samples and heads in one dim."""
        shape = tuple(x.meta["val"].shape)
        if len(shape) == 4:
            return x
        if name_of(x) in VIEWS and tuple(operand(x).meta["val"].shape) == (*heads, *shape[1:]):
            return operand(x)
        return self._made(aten.reshape.default, x, [*heads, *shape[1:]])

    def _turned(self, keys: fx.Node) -> fx.Node:
        """Return keys with their width last."""
        width = keys.meta["val"].dim()
        if keys.target is aten.transpose.int and {d % width for d in keys.args[1:]} == {width - 1, width - 2}:
            return operand(keys)
        return self._made(aten.transpose.int, keys, -1, -2)

    def _grouped(self, k: fx.Node, v: fx.Node, q: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Return keys and values before they were repeated for grouped queries, if both were."""
        few = before_repeat(k, q), before_repeat(v, q)
        return few if len({x.meta["val"].shape[1] for x in few}) == 1 else (k, v)

    def _sinks(self, sinks: fx.Node, heads: int) -> fx.Node | None:
        """Return sinks (h,), given the column (b, h, s, 1) that they are expanded to."""
        while name_of(sinks) in ("expand", "to", "_to_copy"):
            sinks = operand(sinks)
        shape = tuple(sinks.meta["val"].shape)
        if shape not in ((1, heads, 1, 1), (heads, 1, 1)):
            return None
        before = operand(sinks) if name_of(sinks) in VIEWS else sinks
        return before if before.meta["val"].dim() == 1 else self._made(aten.reshape.default, sinks, [heads])

    def _cast(self, x: fx.Node, like: fx.Node) -> fx.Node:
        dtype = like.meta["val"].dtype
        return x if x.meta["val"].dtype == dtype else self._made(aten.to.dtype, x, dtype)

    def _made(self, target, *args) -> fx.Node:
        made = call(self.last, target, *args)
        made.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
        return made


def _fit(q: fx.Node, k: fx.Node, v: fx.Node) -> bool:
    """Return whether heads are those of the canonical attention: of one type but for values, and as many samples."""
    (b, h, _, d), of_keys, of_values = (x.meta["val"].shape for x in (q, k, v))
    is_whole = of_keys[0] == of_values[0] == b and of_keys[3] == d and of_keys[1:3] == of_values[1:3]
    return is_whole and h % of_keys[1] == 0 and q.meta["val"].dtype == k.meta["val"].dtype
