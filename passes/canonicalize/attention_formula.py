"""Attention written out: products, softmax and dropout as ops of their own, where the one-node form does not apply.

The one node keeps no scores, so it cannot drop some of them.
"""

from __future__ import annotations

import torch
from torch import fx

from ...ops import autopar
from .random import Draws

aten = torch.ops.aten


def attention_formula(
    draws: Draws, q: fx.Node, k: fx.Node, v: fx.Node, mask: fx.Node | None, causal: bool, scale: float | None, p: float
) -> fx.Node:
    """Compute dropout(softmax(q k^T * scale + mask)) v for q (b, h, s, d), k and v (b, h_kv, t, d). Rows that a mask
    closes give zeros."""
    shapes = [x.meta["val"].shape for x in (q, k, v)]
    (*_, heads, rows, width), columns = shapes[0], shapes[1][-2]
    q, k, v, mask = (None if x is None else draws.proxy(x) for x in (q, k, v, mask))
    k, v = (_repeated(x, shape, heads) for x, shape in zip((k, v), shapes[1:]))
    scores = autopar.matmul.default(q, aten.transpose.int(k, -1, -2))
    scores = aten.mul.Tensor(scores, width**-0.5 if scale is None else scale)
    if causal:
        ones = draws.node.graph.call_function(
            aten.ones.default, ([rows, columns],), {"dtype": torch.bool, "device": draws.value.device}
        )
        scores = aten.where.ScalarOther(aten.tril.default(draws.proxy(ones)), scores, float("-inf"))
    if mask is not None:
        is_bool = mask.node.meta["val"].dtype == torch.bool
        scores = aten.where.ScalarOther(mask, scores, float("-inf")) if is_bool else aten.add.Tensor(scores, mask)
    weights = aten._safe_softmax.default(scores, -1)
    if p:
        weights = draws.dropout(weights, p, (*shapes[0][:-1], columns))
    return autopar.matmul.default(weights, v).node


def _repeated(x: fx.Proxy, shape, heads: int) -> fx.Proxy:
    """Repeat every head of keys or values as often as it has queries, in place (h0 h0 h1 h1)."""
    b, few, t, d = shape
    if few == heads:
        return x
    x = aten.expand.default(aten.unsqueeze.default(x, 2), [b, few, heads // few, t, d])
    return aten.reshape.default(x, [b, heads, t, d])
