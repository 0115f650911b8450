"""scaled_dot_product_attention -> `autopar::attention`, with masks and repeated heads said plainly.

A mask becomes `causal=True`, a window, the documents that it keeps apart and what else it says (attention_mask.py).
Keys and values repeated for grouped queries are taken before the repetition: the op knows grouped heads itself. Dropout
of the weights is the op's own, so nothing has their size.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..._torch import schema_names
from ...ir.graph import call, operand
from ...ops import autopar
from ...ops.counter_rng import contiguous_strides
from .attention_mask import simplify
from .random import Draws
from .written_masks import Masks, Said, is_learned

aten = torch.ops.aten
_REPEATS = (aten.expand.default, aten.reshape.default, aten.view.default, aten.unsqueeze.default, aten.slice.Tensor)


def attention(graph_module: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """Return the node in the place of a scaled_dot_product_attention; None for tensors of other than four dims."""
    schema = schema_names(node.target)
    given: dict[str, Any] = dict(zip(schema, node.args)) | dict(node.kwargs)
    p = given.get("dropout_p", 0.0)
    if any(given[name].meta["val"].dim() != 4 for name in ("query", "key", "value")):
        return None
    q, k, v = (_unwrap(given[name]) for name in ("query", "key", "value"))
    mask, causal, ids, window = given.get("attn_mask"), bool(given.get("is_causal", False)), None, 0
    if mask is not None:
        found = simplify(graph_module, node, mask, causal)
        mask, causal, ids, window = found.left, found.causal, found.documents, found.window
    said = Said(mask, causal, ids, window=window)
    if mask is not None and mask.meta["val"].is_floating_point() and is_learned(graph_module, mask):
        of_learned = Masks(graph_module, node, (mask,), (), False, q.meta["val"].dtype).said()
        said = of_learned or replace(said, as_softmax=True)
    k, v = (before_repeat(x, q) for x in (k, v))
    drops = dropped(graph_module, node, p, (*q.meta["val"].shape[:-1], k.meta["val"].shape[-2])) if p else ()
    return canonical(node, q, k, v, said, given.get("scale"), drops=drops)


def dropped(graph_module: fx.GraphModule, node: fx.Node, p: float, shape: Sequence[int]) -> tuple:
    """Return the arguments of an attention by which it drops weights (b, h, s, t) with probability p."""
    return Draws(graph_module, node).state, p, 0, 0, contiguous_strides(shape)


def canonical(
    node: fx.Node,
    q: fx.Node,
    k: fx.Node,
    v: fx.Node,
    said: Said,
    scale: float | None,
    sinks: fx.Node | None = None,
    softcap: float = 0.0,
    drops: tuple = (),
) -> fx.Node:
    """Add the canonical attention, in the place of `node`; return its output. `drops`: see `dropped`."""
    arguments: list = [q, k, v, said.mask, said.causal, scale]
    if (ids := said.documents) is not None:
        ids = ids if ids.meta["val"].dim() == 2 else call(node, aten.unsqueeze.default, ids, 0)
        arguments += [0, 0, 0, ids, ids]
    special: dict[str, Any] = {"sinks": sinks, "softcap": softcap, "as_softmax": said.as_softmax}
    if drops:
        arguments += [*(0, 0, 0, None, None)[len(arguments) - 6 :], *special.values(), *drops]
        special = {}
    special["window"] = said.window
    made = call(node, autopar.attention.default, *arguments, **{name: of for name, of in special.items() if of})
    return call(node, operator.getitem, made, 0)


def _unwrap(node: fx.Node) -> fx.Node:
    """Look through copies that change nothing but strides."""
    while node.op == "call_function" and node.target in (aten.contiguous.default, aten.clone.default):
        node = operand(node)
    return node


def before_repeat(kv: fx.Node, q: fx.Node) -> fx.Node:
    """Return the (b, h_kv, t, d) tensor that was repeated to (b, h, t, d) by unsqueeze, expand and reshape; else `kv`
    itself."""
    wanted, node, seen = kv.meta["val"].shape, kv, []
    while node.op == "call_function" and node.target in _REPEATS:
        seen.append(node.target)
        node = operand(node)
        shape = node.meta["val"].shape
        is_source = len(shape) == 4 and shape[0] == wanted[0] and shape[2:] == wanted[2:] and shape[1] < wanted[1]
        if is_source and aten.expand.default in seen and wanted[1] % shape[1] == 0 and _repeats_inner(kv, node):
            return node
    return kv


def _repeats_inner(kv: fx.Node, source: fx.Node) -> bool:
    """Return whether each head is repeated in place (h0 h0 h1 h1), as grouped queries want, checked on the head
    numbers."""
    heads, repeated = source.meta["val"].shape[1], kv.meta["val"].shape[1]
    chain, node = [], kv
    while node is not source:
        chain.append(node)
        node = operand(node)
    if any(n.target is aten.expand.default and n.meta["val"].dim() != 5 for n in chain):
        return False
    expand = next(n for n in chain if n.target is aten.expand.default)
    return tuple(expand.meta["val"].shape[1:3]) == (heads, repeated // heads)
