"""Bytes that attention allocates beside its arguments and results, by the form that serves it on a GPU.

Tensors are those of autopar/ops/workspace.py. What the kernels of torch allocate themselves is in it as their source
has it; the rest is what autopar's own forms do.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from . import attention_blocks_bytes as blocks
from . import attention_documents, attention_fused, attention_gpu, attention_heads, attention_rows, attention_window
from .attention_dropout import WeightDropout
from .attention_forms import Like, lse_dtype, numel
from .counter_rng import ALL

TAKE_FIRST = ("blocks", "fused")  # forms that take the number of the first query


def attention(
    q: Like,
    k: Like,
    v: Like,
    mask: Like | None,
    causal: bool,
    scale: float | None,
    first: int = 0,
    head: int = 0,
    group: int = 0,
    documents: Like | None = None,
    key_documents: Like | None = None,
    sinks: Like | None = None,
    softcap: float = 0.0,
    as_softmax: bool = False,
    *dropout,
    **named,
) -> int:
    """Return the bytes of a forward."""
    dropout, window = _drops(*dropout, **named)
    if group:
        k, v, copied = _heads_read(q, k, v, head, group)
        rest = documents, key_documents, sinks, softcap, as_softmax, *dropout
        return copied + attention(q, k, v, mask, causal, scale, first, 0, 0, *rest, window=window)
    if sinks is not None:  # the output over them, beside that over the keys, and two numbers a query
        joined = _out(q, v) + 2 * math.prod(q.shape[:3]) * lse_dtype(q.dtype).itemsize
        rest = documents, key_documents, None, softcap, as_softmax, *dropout
        return joined + attention(q, k, v, mask, causal, scale, first, 0, 0, *rest, window=window)
    if (ranges := _range(q, k, mask, documents, causal, first, window)) is not None:
        part, own, making = ranges
        made, keys, values = _bytes(own), _columns(k, own), _columns(v, own)
        lse = math.prod(q.shape[:3]) * lse_dtype(q.dtype).itemsize
        rest = 0, 0, 0, None, None, None, softcap, as_softmax, *dropout
        inside = made + attention(part, keys, values, own, False, scale, *rest)
        return max(_out(q, v) + 2 * lse, inside, making - _out(part, v))
    (b, h, s, d), t, item = q.shape, k.shape[2], q.dtype.itemsize
    form = _form(q, k, v, mask, causal, None, bool(softcap), _dropped(*dropout))
    if causal and first and form not in TAKE_FIRST:
        joined = b * h * s * v.shape[-1] * (2 * item + 3 * lse_dtype(q.dtype).itemsize)
        return joined + max(attention(q, *part, scale) for part in _parts(q, k, v, mask, first))
    lse = b * h * s * lse_dtype(q.dtype).itemsize
    if form == "blocks":
        inside = blocks.forward_bytes(q, k, v, mask, causal, softcap, _dropped(*dropout))
        return _made(mask, q) + max(inside, lse + _out(q, v))
    if form == "fused":
        return _made(mask, q) + lse
    width, out = _width(q, v), _out(q, v)
    wide_out = out * width // v.shape[-1]
    copies = (b * h * s * width * item if width != d else 0) + _keys(k, q, width, form) + _keys(v, q, width, form)
    kept, made, aligned, search = _mask_bytes(mask, q, t, causal)
    if form != "efficient":
        return max(copies + wide_out - out, (wide_out if width != v.shape[-1] else 0) + lse)
    wide_lse = b * h * _padded(s) * 4
    in_kernel = copies + aligned + wide_out + wide_lse - out - lse
    behind = wide_out - out + wide_lse - lse + search if mask is not None else 0
    closed = wide_out + wide_lse if mask is not None else (wide_out if width != v.shape[-1] else 0) + wide_lse
    return max(made - out - lse, kept + max(in_kernel, behind, closed))


def attention_bw(
    grad: Like,
    q: Like,
    k: Like,
    v: Like,
    out: Like,
    lse: Like,
    mask: Like | None,
    causal: bool,
    scale: float | None,
    first: int = 0,
    head: int = 0,
    group: int = 0,
    documents: Like | None = None,
    key_documents: Like | None = None,
    of_block: bool = False,
    softcap: float = 0.0,
    *dropout,
    of_mask: bool = False,
    **named,
) -> int:
    """Return the bytes of a backward; `of_mask`: also of what is added to the scores."""
    dropout, window = _drops(*dropout, **named)
    if group:  # the gradients of what is read stand beside those of all heads
        k, v, copied = _heads_read(q, k, v, head, group)
        made = (numel(k) + numel(v)) * q.dtype.itemsize
        rest = first, 0, 0, documents, key_documents, of_block, softcap, *dropout
        here = attention_bw(grad, q, k, v, out, lse, mask, causal, scale, *rest, of_mask=of_mask, window=window)
        return copied + made + here
    if (ranges := _range(q, k, mask, documents, causal, first, window)) is not None:
        part, own, making = ranges
        made, keys, values = _bytes(own), _columns(k, own), _columns(v, own)
        of_keys = _bytes(k) + _bytes(v)  # whose gradients are there behind the last range
        sums = (numel(k) + numel(v)) * lse_dtype(q.dtype).itemsize
        rest = 0, 0, 0, None, None, of_block, softcap, *dropout
        inside = made + attention_bw(part, part, keys, values, part, lse, own, False, scale, *rest, of_mask=of_mask)
        inside = max(inside + _bytes(keys) + _bytes(values), making - _bytes(part)) - of_keys
        several = numel(q) * q.dtype.itemsize if part.shape[2] < q.shape[2] else 0
        return sums + max(inside, several)
    (b, h, s, d), t, item = q.shape, k.shape[2], q.dtype.itemsize
    form = _form(q, k, v, mask, causal, mask if of_mask else None, bool(softcap), _dropped(*dropout))
    if causal and first and form not in TAKE_FIRST:
        whole, parts = (numel(q) + numel(k) + numel(v)) * item, _parts(q, k, v, mask, first)
        return 2 * whole + max(attention_bw(grad, q, *p[:2], out, lse, *p[2:], scale) for p in parts)
    if form == "blocks":
        return _made(mask, q) + blocks.backward_bytes(q, k, v, mask, causal, softcap, _dropped(*dropout), of_mask)
    if form == "fused":  # a number a query, between the kernels
        return _made(mask, q) + b * h * s * lse_dtype(q.dtype).itemsize
    width = _width(q, v)
    rows, heads = b * h * s * width * item, h if form == "efficient" else k.shape[1]
    copies = rows * ((width != d) + (width != v.shape[-1]) * 2)  # q, the output and its gradient
    copies += _keys(k, q, width, form) + _keys(v, q, width, form)
    of_keys, wide_keys = (numel(k) + numel(v)) * item, 2 * b * heads * t * width * item  # gradients, from the kernel
    wider = rows - numel(q) * item + wide_keys - of_keys
    inside = _inside(form, b, h, s, t, width, item, grouped=k.shape[1] != h)
    behind = wide_keys + (rows if width != d else 0) if wider else 0
    if form != "efficient":
        return max(copies + wider + inside, behind)
    kept, made, aligned, _ = _mask_bytes(mask, q, t, causal=False)
    lse_bytes, padded = (b * h * s * 4 if mask is not None else 0), (b * h * _padded(s) * 4 if s % 32 else 0)
    return max(made, kept + lse_bytes + max(copies + wider + aligned + padded + inside, behind))


def attention_bias_bw(
    grad: Like, q: Like, k: Like, v: Like, out: Like, lse: Like, mask: Like, *constants, **named
) -> int:
    """Return what the gradient of a mask adds: itself in the wide type, beside that in its own."""
    made = numel(mask) * lse_dtype(q.dtype).itemsize
    return made + attention_bw(grad, q, k, v, out, lse, mask, *constants, of_mask=True, **named)


def _form(
    q: Like,
    k: Like,
    v: Like,
    mask: Like | None,
    causal: bool,
    dmask: Like | None,
    caps: bool,
    dropout: WeightDropout | None,
) -> str:
    """Return the name of the form that serves an attention."""
    if not (caps or dropout or dmask is not None):
        return attention_gpu.form_of(q, k, v, mask, causal).name
    return "fused" if attention_fused.serves(q, k, v, dmask, dropout) else "blocks"


def even_gradient(grad: Like, mask: Like, keys: int) -> int:
    """Return where the mask is highest, and some numbers a query."""
    return numel(mask) + math.prod(mask.shape[:-1]) * 32


def _heads_read(q: Like, k: Like, v: Like, head: int, group: int) -> tuple[Like, Like, int]:
    """Return the heads of keys and values that the queries read, on tensors without memory, and the bytes of their
    copies: none where they are views."""
    even = attention_heads.is_grouped_evenly(q, head, group)
    heads = attention_heads.heads_read(q, head, group)[1] if even else q.shape[1]
    k, v = (torch.empty(x.shape[0], heads, *x.shape[2:], dtype=x.dtype, device="meta") for x in (k, v))
    return k, v, 0 if even else (numel(k) + numel(v)) * q.dtype.itemsize


def _range(
    q: Like, k: Like, mask: Like | None, documents: Like | None, causal: bool, first: int, window: int
) -> tuple[Like, Like, int] | None:
    """Return a range of the queries, and its mask as a kernel gets it, on tensors without memory, and the bytes while
    it is made; None if all queries are served together."""
    window = window if attention_window.closes_some(window, q, k, causal, first) else 0
    if documents is None and not window:
        return None
    b, h, s, d = q.shape
    samples = 1 if documents is None else documents.shape[0]
    most = (
        attention_window.rows_of(window)
        if documents is None
        else attention_documents.rows_of(k, documents, window=window)
    )
    rows, columns = min(s, most), k.shape[2]
    if window:
        columns = min(columns, rows + (1 if causal else 2) * (window - 1))
    if mask is not None:
        samples = max(samples, mask.shape[0] if len(mask.shape) > 3 else 1)
    heads = mask.shape[1] if mask is not None and documents is None and len(mask.shape) > 3 else 1
    part = torch.empty(b, h, rows, d, dtype=q.dtype, device="meta")
    own = torch.empty(samples, heads, rows, columns, dtype=q.dtype, device="meta")
    return part, own, _bytes(own) + 2 * numel(own) + 8 * (rows + columns)  # with the numbers of queries and keys


def _drops(*dropout, **named) -> tuple[tuple, int]:
    """Return what an attention's arguments from `state` on say: those of dropout, none where it drops nothing, and the
    window."""
    names = ("state", "p", "stream", "start", "strides", "micro_batch_step", "window")
    given: dict[str, Any] = dict(zip(names, dropout)) | named
    drops = given.get("strides") is not None
    return tuple(given.get(name, 0) for name in names[:-1]) if drops else (), given.get("window", 0)


def _columns(x: Like, mask: Like) -> Like:
    """Return as many keys or values as a range's mask has, on tensors without memory."""
    b, heads, _, width = x.shape
    return torch.empty(b, heads, mask.shape[-1], width, dtype=x.dtype, device="meta")


def _parts(q: Like, k: Like, v: Like, mask: Like | None, first: int) -> list[attention_rows.Part]:
    """Return the calls that serve a range of the queries, on tensors without memory."""
    q, k, v = (torch.empty(tuple(x.shape), dtype=x.dtype, device="meta") for x in (q, k, v))
    mask = None if mask is None else torch.empty(tuple(mask.shape), dtype=mask.dtype, device="meta")
    return attention_rows.parts(q, k, v, mask, first)


def _inside(form: str, b: int, h: int, s: int, t: int, width: int, item: int, grouped: bool) -> int:
    """Return what the backward kernels allocate: the sum of a query's gradients in fp32 and its row sums; flash also
    the gradients of keys and values of each head of the queries."""
    rows = b * h * (-(-s // 128) * 128)
    total = rows * 4
    if form == "flash" or item < 4:
        total += rows * (-(-width // 32) * 32) * 4
    if form in ("flash", "cudnn") and grouped:
        total += 2 * b * h * t * width * item
    return total


def _keys(x: Like, q: Like, width: int, form: str) -> int:
    """Return the bytes of keys or values as a kernel gets them, beyond what they are: repeated, and padded."""
    b, heads, t, own = x.shape
    repeats = form == "efficient" and heads != q.shape[1]
    wanted = q.shape[1] if repeats else heads
    copies = (b * wanted * t * own if repeats else 0) + (b * wanted * t * width if width != own else 0)
    return copies * x.dtype.itemsize


def _mask_bytes(mask: Like | None, q: Like, columns: int, causal: bool) -> tuple[int, int, int, int]:
    """Return the bytes of a mask that is added, those while it is made, of a copy with aligned rows, and of the search
    for closed queries."""
    if mask is None:
        return 0, 0, 0, 0
    item, is_bool = q.dtype.itemsize, mask.dtype == torch.bool
    kept = numel(mask) * item if is_bool else 0
    made = kept + numel(mask) if is_bool else 0
    aligned = 0
    if mask.shape[-1] % attention_gpu.BIAS_ALIGNMENT:
        aligned = math.prod(mask.shape[:-1]) * _up(columns, attention_gpu.BIAS_ALIGNMENT) * item
    search = numel(mask)
    if causal:
        whole = q.shape[0] * q.shape[2] * columns if len(mask.shape) > 1 and mask.shape[-2] > 1 else 0
        search = search + whole + q.shape[2] * columns if whole else 10 * search  # of keys alone: counted in int64
    return kept, made, aligned, search


def _up(count: int, step: int) -> int:
    return -(-count // step) * step


def _padded(rows: int) -> int:
    """Return the rows of a log-sum-exp as the memory-efficient kernel has it."""
    return _up(rows, 32)


def _dropped(*dropout) -> WeightDropout | None:
    """Return the dropout of weights that an attention's arguments say."""
    if not dropout:
        return None
    _, p, _, start, strides, *_ = dropout
    return WeightDropout(0, start, tuple(strides), round(p * ALL))


def _made(mask: Like | None, q: Like) -> int:
    """Return the bytes of what is added for a mask of bools."""
    return numel(mask) * q.dtype.itemsize if mask is not None and mask.dtype == torch.bool else 0


def _width(q: Like, v: Like) -> int:
    return -(-max(q.shape[-1], v.shape[-1]) // 8) * 8


def _out(q: Like, v: Like) -> int:
    return math.prod(q.shape[:3]) * v.shape[-1] * q.dtype.itemsize


def _bytes(x: Like) -> int:
    return numel(x) * x.dtype.itemsize
