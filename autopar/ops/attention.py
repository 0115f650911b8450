"""The canonical attention and its gradient, one node each, whatever computes them.

What a model adds to softmax(q k^T scale + mask) v is part of it, so that it is sharded alike: a cap on the scores, a
score that belongs to no key (attention_sinks.py), the gradient of what is added to the scores, dropout of the weights
(attention_dropout.py). That is said by arguments as `autopar::dropout` takes them for all weights: `state`, `p`,
`stream`, `start`, the index of the first weight (b, h, s, t) here, and `strides`, the steps of the index.

Tensors are those of autopar/ops/attention_forms.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.library import custom_op

from . import (
    attention_blocks,
    attention_cpu,
    attention_documents,
    attention_fused,
    attention_gpu,
    attention_heads,
    attention_ranges,
    attention_rows,
    attention_sinks,
    attention_window,
)
from .attention_bias import even_gradient
from .attention_blocks import BLOCKS
from .attention_dropout import WeightDropout, weight_dropout
from .attention_forms import Form, additive, contiguous, lse_dtype

FROM_END = -(2**40)  # added to the number of a first query that is counted from the end of the keys


def _form(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, at: tuple[int, int] = (0, 0)) -> Form:
    if q.is_cuda:
        return attention_gpu.form_of(q, k, v, mask, causal)
    return attention_cpu.CPU if q.is_cpu else BLOCKS


def _form_of(softcap: float, dropout: WeightDropout | None, dmask: Tensor | None = None) -> attention_rows.FormOf:
    """Return what chooses the form of a call: no kernel of torch caps scores, drops weights as autopar does or gives
    the gradient of a mask."""
    if not softcap and dropout is None and dmask is None:
        return _form

    def form_of(q, k, v, mask, causal, at: tuple[int, int] = (0, 0)) -> Form:
        own = None if dmask is None else attention_ranges.from_place(dmask, *at)
        dropped = None if dropout is None else dropout.behind(*at)
        is_fused = attention_fused.serves(q, k, v, own, dropped) and attention_fused.is_there(q.device)
        return (attention_fused if is_fused else attention_blocks).form_with(softcap, own, dropped)

    return form_of


def _ranges_of(
    q: Tensor,
    k: Tensor,
    causal: bool,
    first: int,
    documents: Tensor | None,
    key_documents: Tensor | None,
    window: int,
) -> Iterator[attention_ranges.Range] | None:
    """Return ranges of the queries, each with some of the keys; None if one call serves all with all keys."""
    window = window if attention_window.closes_some(window, q, k, causal, first) else 0
    if documents is not None and key_documents is not None:
        return attention_documents.ranges(q, k, causal, first, documents, key_documents, window)
    return attention_window.ranges(q, k, causal, first, window) if window else None


def counted(first: int, k: Tensor) -> int:
    """Return the number of the first query, which may be counted from the end of the keys (FROM_END)."""
    return first - FROM_END + k.shape[2] if first < FROM_END // 2 else first


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _seq_major(x: Tensor) -> Tensor:
    """Return the same values stored as (b, s, h, d), which the projection after attention reads without a copy."""
    return contiguous(x.transpose(1, 2)).transpose(1, 2)


@custom_op("autopar::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    first: int = 0,
    head: int = 0,
    group: int = 0,
    documents: Tensor | None = None,
    key_documents: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    as_softmax: bool = False,
    state: Tensor | None = None,
    p: float = 0.0,
    stream: int = 0,
    start: int = 0,
    strides: Sequence[int] | None = None,
    micro_batch_step: int = 0,
    window: int = 0,
) -> tuple[Tensor, Tensor]:
    """Compute scaled dot-product attention. q is (b, h, s, d), k (b, h_kv, t, d) and v (b, h_kv, t, d_v) with h a
    multiple of h_kv (grouped queries); mask is bool or additive, broadcastable to (b, h, s, t). `first` is the number
    of the first query, with FROM_END counted from the end of the keys: under a causal mask it attends to keys 0 to
    `first`, and numbers that are added close none of them. If `group` is given, so many heads of queries read one of
    keys, and the first one here is number `head`. With `documents` (b, s) and `key_documents` (b, t), integers, or one
    row for all samples, a query attends to the keys whose integer is its own. `sinks` (h,): see attention_sinks.py.
    Scores x, scaled, become softcap * tanh(x / softcap) before the mask, if that is not 0. `as_softmax`, under an
    additive mask: the gradient of a query whose keys a lowest number closes all is that of attending to them alike, as
    a softmax gives it. With a `window`
    that is not 0 a query attends to the keys less than so many places away from it: attention_window.py. Returns the
    output (b, h, s, d_v) and the log-sum-exp (b, h, s): 0 and -inf for a query that may attend to no key."""
    mask, scale, first = additive(mask, q.dtype), _scale(q, scale), counted(first, k)
    k, v = (attention_heads.read(x, q, head, group) for x in (k, v))
    form = _form_of(softcap, weight_dropout(state, p, stream, start, strides, micro_batch_step))
    ranges = _ranges_of(q, k, causal, first, documents, key_documents, window)
    if ranges is None:
        out, lse = attention_rows.forward(form, q, k, v, mask, causal, scale, first)
    else:
        out, lse = attention_ranges.forward(form, ranges, q, k, v, mask, scale)
    if sinks is not None:
        out, lse = attention_sinks.joined(out, lse, sinks)
    return _seq_major(out), lse.clone(memory_format=torch.contiguous_format)


@custom_op("autopar::attention_bw", mutates_args=())
def attention_bw(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    first: int = 0,
    head: int = 0,
    group: int = 0,
    documents: Tensor | None = None,
    key_documents: Tensor | None = None,
    of_block: bool = False,
    softcap: float = 0.0,
    state: Tensor | None = None,
    p: float = 0.0,
    stream: int = 0,
    start: int = 0,
    strides: Sequence[int] | None = None,
    micro_batch_step: int = 0,
    window: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; those of keys and values are sums over the queries that are here. `of_block`:
    the log-sum-exp is exact, and may be over more keys than are here, or sinks."""
    is_exact = mask is None or mask.dtype == torch.bool or of_block or softcap != 0.0
    mask, scale, first = additive(mask, q.dtype), _scale(q, scale), counted(first, k)
    keys, values = (attention_heads.read(x, q, head, group) for x in (k, v))
    form = _form_of(softcap, weight_dropout(state, p, stream, start, strides, micro_batch_step))
    ranges, tensors = _ranges_of(q, k, causal, first, documents, key_documents, window), (q, keys, values, out, lse)
    if ranges is None:
        dq, dk, dv = attention_rows.backward(form, grad, *tensors, mask, causal, scale, first, is_exact)
    else:
        dq, dk, dv = attention_ranges.backward(form, ranges, grad, *tensors, mask, scale, is_exact)
    dk, dv = (attention_heads.of_all(d, x, q, head, group) for d, x in ((dk, k), (dv, v)))
    return _seq_major(dq), _seq_major(dk), _seq_major(dv)


@custom_op("autopar::attention_bias_bw", mutates_args=())
def attention_bias_bw(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor,
    causal: bool,
    scale: float | None,
    first: int = 0,
    head: int = 0,
    group: int = 0,
    documents: Tensor | None = None,
    key_documents: Tensor | None = None,
    of_block: bool = False,
    softcap: float = 0.0,
    state: Tensor | None = None,
    p: float = 0.0,
    stream: int = 0,
    start: int = 0,
    strides: Sequence[int] | None = None,
    micro_batch_step: int = 0,
    window: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and of the mask that is added to the scores: as `attention_bw`, without
    documents."""
    if documents is not None or key_documents is not None:
        raise RuntimeError("no gradient of a mask among documents")
    first = counted(first, k)
    dmask = torch.zeros(mask.shape, dtype=lse_dtype(q.dtype), device=mask.device)
    keys, values = (attention_heads.read(x, q, head, group) for x in (k, v))
    form = _form_of(softcap, weight_dropout(state, p, stream, start, strides, micro_batch_step), dmask)
    ranges, tensors = _ranges_of(q, k, causal, first, None, None, window), (q, keys, values, out, lse)
    if ranges is None:
        dq, dk, dv = attention_rows.backward(form, grad, *tensors, mask, causal, _scale(q, scale), first, True)
    else:
        dq, dk, dv = attention_ranges.backward(form, ranges, grad, *tensors, mask, _scale(q, scale), True)
    dk, dv = (attention_heads.of_all(d, x, q, head, group) for d, x in ((dk, k), (dv, v)))
    return _seq_major(dq), _seq_major(dk), _seq_major(dv), dmask.to(mask.dtype)


def _empty_seq_major(like: Tensor, shape) -> Tensor:
    b, h, s, d = shape
    return like.new_empty(b, s, h, d).transpose(1, 2)


@attention.register_fake
def _(q, k, v, mask, causal, scale, *_, **__):
    return _empty_seq_major(q, (*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=lse_dtype(q.dtype))


@attention_bw.register_fake
def _(grad, q, k, v, *others, **constants):
    return _empty_seq_major(q, q.shape), _empty_seq_major(k, k.shape), _empty_seq_major(v, v.shape)


@attention_bias_bw.register_fake
def _(grad, q, k, v, out, lse, mask, *others, **constants):
    gradients = (_empty_seq_major(x, x.shape) for x in (q, k, v))
    return *gradients, mask.new_empty(mask.shape)


def _setup(ctx, inputs, output):
    q, k, v, mask, *ctx.constants = inputs[:9]
    documents, key_documents, sinks, ctx.softcap, ctx.as_softmax, state, *ctx.dropout, ctx.window = inputs[9:]
    ctx.save_for_backward(q, k, v, *output, mask, documents, key_documents, sinks, state)


def _backward(ctx, grad, _):
    q, k, v, out, lse, mask, *documents, sinks, state = ctx.saved_tensors
    wants_mask, wants_sinks = ctx.needs_input_grad[3], sinks is not None and ctx.needs_input_grad[11]
    of_keys = even_gradient(grad, mask, k.shape[2]) if ctx.as_softmax else grad
    arguments = of_keys, q, k, v, out, lse, mask, *ctx.constants, *documents
    is_exact = sinks is not None or ctx.as_softmax
    special = (is_exact, ctx.softcap) if is_exact or ctx.softcap or state is not None else ()
    dropout = () if state is None else (state, *ctx.dropout)
    within = {"window": ctx.window} if ctx.window else {}
    backward = attention_bias_bw if wants_mask else attention_bw
    *gradients, dmask = (*backward(*arguments, *special, *dropout, **within), None)[:4]
    dsinks = attention_sinks.attention_sinks_bw(grad, out, lse, sinks) if wants_sinks else None
    others = [None for _ in (ctx.softcap, ctx.as_softmax, state, *ctx.dropout, ctx.window)]
    return (*gradients, dmask, *[None for _ in (*ctx.constants, *documents)], dsinks, *others)


attention.register_autograd(_backward, setup_context=_setup)
