"""Bytes that an op allocates beside its arguments and results and frees before it returns.

    workspace_bytes(autopar.attention_bw.default, grad, q, k, v, out, lse, None, True, None)

Arguments are those of the call, with anything that has a `shape` and a `dtype` for a tensor: a fake local one, or one
without memory. Tensors count as they come from a projection: heads stored as (b, s, h, d), all else without gaps. What
the kernels of a GPU allocate themselves is in it as their source has it; the rest is what autopar's own forms do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import attention_blocks_bytes as blocks
from . import attention_documents, attention_gpu, attention_heads, attention_rows, attention_window
from .attention_dropout import WeightDropout
from .attention_forms import Like, lse_dtype
from .counter_rng import ALL, drawing_bytes
from .linear_loss import block_shape
from .vocab_loss import chunk_rows

SORTED_BYTES = 40  # a row of a grouped product: its place, the sorted places and their order, what the sort works on


def workspace_bytes(op: object, *arguments, **named) -> int:
    """Return the bytes of a canonical op on a GPU at its peak, 0 for an op that needs none worth counting."""
    count = _COUNTS.get(str(op))
    return 0 if count is None else count(*arguments, **named)


def _attention(
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
    dropout, window = _drops(*dropout, **named)
    if group:
        k, v, copied = _heads_read(q, k, v, head, group)
        rest = documents, key_documents, sinks, softcap, as_softmax, *dropout
        return copied + _attention(q, k, v, mask, causal, scale, first, 0, 0, *rest, window=window)
    if sinks is not None:  # the output over them, beside that over the keys, and two numbers a query
        joined = _out(q, v) + 2 * math.prod(q.shape[:3]) * lse_dtype(q.dtype).itemsize
        rest = documents, key_documents, None, softcap, as_softmax, *dropout
        return joined + _attention(q, k, v, mask, causal, scale, first, 0, 0, *rest, window=window)
    if (ranges := _range(q, k, mask, documents, causal, first, window)) is not None:
        part, own, making = ranges
        made, keys, values = _bytes(own), _columns(k, own), _columns(v, own)
        lse = math.prod(q.shape[:3]) * lse_dtype(q.dtype).itemsize
        rest = 0, 0, 0, None, None, None, softcap, as_softmax, *dropout
        inside = made + _attention(part, keys, values, own, False, scale, *rest)
        return max(_out(q, v) + 2 * lse, inside, making - _out(part, v))
    (b, h, s, d), t, item = q.shape, k.shape[2], q.dtype.itemsize
    form = "blocks" if softcap or dropout else attention_gpu.form_of(q, k, v, mask, causal).name
    if causal and first and form != "blocks":
        joined = b * h * s * v.shape[-1] * (2 * item + 3 * lse_dtype(q.dtype).itemsize)
        return joined + max(_attention(q, *part, scale) for part in _parts(q, k, v, mask, first))
    lse = b * h * s * lse_dtype(q.dtype).itemsize
    if form == "blocks":
        inside = blocks.forward_bytes(q, k, v, mask, causal, softcap, _dropped(*dropout))
        return _made(mask, q) + max(inside, lse + _out(q, v))
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


def _attention_bw(
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
    dropout, window = _drops(*dropout, **named)
    if group:  # the gradients of what is read stand beside those of all heads
        k, v, copied = _heads_read(q, k, v, head, group)
        made = (_numel(k) + _numel(v)) * q.dtype.itemsize
        rest = first, 0, 0, documents, key_documents, of_block, softcap, *dropout
        here = _attention_bw(grad, q, k, v, out, lse, mask, causal, scale, *rest, of_mask=of_mask, window=window)
        return copied + made + here
    if (ranges := _range(q, k, mask, documents, causal, first, window)) is not None:
        part, own, making = ranges
        made, keys, values = _bytes(own), _columns(k, own), _columns(v, own)
        of_keys = _bytes(k) + _bytes(v)  # whose gradients are there behind the last range
        sums = (_numel(k) + _numel(v)) * lse_dtype(q.dtype).itemsize
        rest = 0, 0, 0, None, None, of_block, softcap, *dropout
        inside = made + _attention_bw(part, part, keys, values, part, lse, own, False, scale, *rest, of_mask=of_mask)
        inside = max(inside + _bytes(keys) + _bytes(values), making - _bytes(part)) - of_keys
        several = _numel(q) * q.dtype.itemsize if part.shape[2] < q.shape[2] else 0
        return sums + max(inside, several)
    (b, h, s, d), t, item = q.shape, k.shape[2], q.dtype.itemsize
    form = "blocks" if of_mask or softcap or dropout else attention_gpu.form_of(q, k, v, mask, causal).name
    if causal and first and form != "blocks":
        whole, parts = (_numel(q) + _numel(k) + _numel(v)) * item, _parts(q, k, v, mask, first)
        return 2 * whole + max(_attention_bw(grad, q, *p[:2], out, lse, *p[2:], scale) for p in parts)
    if form == "blocks":
        return _made(mask, q) + blocks.backward_bytes(q, k, v, mask, causal, softcap, _dropped(*dropout), of_mask)
    width = _width(q, v)
    rows, heads = b * h * s * width * item, h if form == "efficient" else k.shape[1]
    copies = rows * ((width != d) + (width != v.shape[-1]) * 2)  # q, the output and its gradient
    copies += _keys(k, q, width, form) + _keys(v, q, width, form)
    of_keys, wide_keys = (_numel(k) + _numel(v)) * item, 2 * b * heads * t * width * item  # gradients, from the kernel
    wider = rows - _numel(q) * item + wide_keys - of_keys
    inside = _inside(form, b, h, s, t, width, item, grouped=k.shape[1] != h)
    behind = wide_keys + (rows if width != d else 0) if wider else 0
    if form != "efficient":
        return max(copies + wider + inside, behind)
    kept, made, aligned, _ = _mask_bytes(mask, q, t, causal=False)
    lse_bytes, padded = (b * h * s * 4 if mask is not None else 0), (b * h * _padded(s) * 4 if s % 32 else 0)
    return max(made, kept + lse_bytes + max(copies + wider + aligned + padded + inside, behind))


def _attention_bias_bw(
    grad: Like, q: Like, k: Like, v: Like, out: Like, lse: Like, mask: Like, *constants, **named
) -> int:
    """Return what the gradient of a mask adds: itself in the wide type, beside that in its own."""
    made = _numel(mask) * lse_dtype(q.dtype).itemsize
    return made + _attention_bw(grad, q, k, v, out, lse, mask, *constants, of_mask=True, **named)


def _even_gradient(grad: Like, mask: Like, keys: int) -> int:
    """Return where the mask is highest, and some numbers a query."""
    return _numel(mask) + math.prod(mask.shape[:-1]) * 32


def _heads_read(q: Like, k: Like, v: Like, head: int, group: int) -> tuple[Like, Like, int]:
    """Return the heads of keys and values that the queries read, on tensors without memory, and the bytes of their
    copies: none where they are views."""
    even = attention_heads.is_grouped_evenly(q, head, group)
    heads = attention_heads.heads_read(q, head, group)[1] if even else q.shape[1]
    k, v = (torch.empty(x.shape[0], heads, *x.shape[2:], dtype=x.dtype, device="meta") for x in (k, v))
    return k, v, 0 if even else (_numel(k) + _numel(v)) * q.dtype.itemsize


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
    return part, own, _bytes(own) + 2 * _numel(own) + 8 * (rows + columns)  # with the numbers of queries and keys


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
    kept = _numel(mask) * item if is_bool else 0
    made = kept + _numel(mask) if is_bool else 0
    aligned = 0
    if mask.shape[-1] % attention_gpu.BIAS_ALIGNMENT:
        aligned = math.prod(mask.shape[:-1]) * _up(columns, attention_gpu.BIAS_ALIGNMENT) * item
    search = _numel(mask)
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
    return _numel(mask) * q.dtype.itemsize if mask is not None and mask.dtype == torch.bool else 0


def _width(q: Like, v: Like) -> int:
    return -(-max(q.shape[-1], v.shape[-1]) // 8) * 8


def _out(q: Like, v: Like) -> int:
    return math.prod(q.shape[:3]) * v.shape[-1] * q.dtype.itemsize


def _numel(x: Like) -> int:
    return math.prod(x.shape)


def _bytes(x: Like) -> int:
    return _numel(x) * x.dtype.itemsize


def _vocab_loss(logits: Like, target: Like, row_max: Like, offset: int) -> int:
    """Return a chunk in the wide type, and some numbers a row."""
    return _chunk(logits, row_max) + _numel(target) * 32


def _vocab_loss_bw(grad_sum: Like, grad_picked: Like, logits: Like, target: Like, row_max: Like, offset: int) -> int:
    return _chunk(logits, row_max) + _numel(target) * 32


def _chunk(logits: Like, row_max: Like) -> int:
    rows, columns = _numel(row_max), logits.shape[-1]
    return min(rows, chunk_rows(rows, columns)) * columns * row_max.dtype.itemsize


def logits_bytes(rows: int, columns: int, hidden: int, dtype: torch.dtype, backward: bool) -> int:
    """Return the bytes of a block of logits and of what is made of it, where `rows` times a weight (columns, hidden)
    and its loss are computed in blocks (autopar/ops/linear_loss.py)."""
    high, width = block_shape(rows, columns, hidden)
    item, wide = dtype.itemsize, lse_dtype(dtype).itemsize
    inside = high * width * wide
    if backward and item < wide:
        inside = high * hidden * wide + max(inside, high * hidden * item)
    return high * width * item + inside + high * 48 + rows * 8


def _linear_loss(x: Like, weight: Like, target: Like, offset: int) -> int:
    return logits_bytes(_numel(x) // x.shape[-1], weight.shape[0], x.shape[-1], x.dtype, False)


def _linear_loss_bw(grad_sum: Like, grad_picked: Like, x: Like, weight: Like, *rest) -> int:
    return logits_bytes(_numel(x) // x.shape[-1], weight.shape[0], x.shape[-1], x.dtype, True)


def _embedding(weight: Like, index: Like, padding_idx: int, offset: int) -> int:
    return _numel(index) * (weight.shape[1] * weight.dtype.itemsize + 24)


def _embedding_dw(grad: Like, index: Like, padding_idx: int, offset: int, rows: int) -> int:
    return _numel(grad) * grad.dtype.itemsize + _numel(index) * 32


def _grouped_mm(x: Like, weight: Like, group: Like, offset: int = 0) -> int:
    """Return the sorted rows, what they give in that order, and the sort's own numbers."""
    return (_numel(x) + x.shape[0] * weight.shape[2]) * x.dtype.itemsize + _numel(group) * SORTED_BYTES


def _grouped_mm_dw(x: Like, grad: Like, group: Like, groups: int, offset: int = 0) -> int:
    return (_numel(x) + _numel(grad)) * x.dtype.itemsize + _numel(group) * SORTED_BYTES


def _dropout(x: Like, state: Like, p: float, stream: int, start: int, strides: Sequence[int], *_: int) -> int:
    return drawing_bytes(x.shape, strides, start, "cuda")


def _fp8_quantize(x: Like, *_: object) -> int:
    """Return x * scale."""
    return _numel(x) * torch.promote_types(x.dtype, torch.float32).itemsize


def _fp8_linear_dx(grad: Like, _: Like, weight: Like, *__: object) -> int:
    """Return the codes that are copied into the order of the other dim."""
    return _numel(weight)


def _fp8_linear_dw(grad: Like, _: Like, x: Like, *__: object) -> int:
    return _numel(grad) + _numel(x)


_COUNTS: dict[str, Callable[..., int]] = {
    "autopar.attention.default": _attention,
    "autopar.attention_bw.default": _attention_bw,
    "autopar.attention_bias_bw.default": _attention_bias_bw,
    "autopar.even_gradient.default": _even_gradient,
    "autopar.dropout.default": _dropout,
    "autopar.vocab_loss.default": _vocab_loss,
    "autopar.vocab_loss_bw.default": _vocab_loss_bw,
    "autopar.linear_loss.default": _linear_loss,
    "autopar.linear_loss_bw.default": _linear_loss_bw,
    "autopar.fp8_rows.default": _fp8_quantize,
    "autopar.fp8_columns.default": _fp8_quantize,
    "autopar.fp8_blocks.default": _fp8_quantize,
    "autopar.fp8_tensor.default": _fp8_quantize,
    "autopar.fp8_linear_dx.default": _fp8_linear_dx,
    "autopar.fp8_linear_dw.default": _fp8_linear_dw,
    "autopar.grouped_mm.default": _grouped_mm,
    "autopar.grouped_mm_dw.default": _grouped_mm_dw,
    "autopar.embedding.default": _embedding,
    "autopar.embedding_dw.default": _embedding_dw,
}
