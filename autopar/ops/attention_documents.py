"""Attention among documents that are packed into a row: a query attends to the keys of its own document.

A document is an integer that its queries and keys share. Queries are served range by range, each under a mask of its
own that is made of the integers and dropped behind it, so no mask of all pairs exists. A range has keys up to where a
causal mask closes them. On a CPU, where integers are read without waiting, it has those from the first to the last
whose integer is between the range's own, so documents cost what they need, and nothing is computed where a device has
no key of them. A GPU is never waited for, and computes what the mask closes.

Tensors are those of autopar/ops/attention_forms.py; documents are (b, s) and (b, t), or (1, s) and (1, t).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from . import attention_rows
from .attention_forms import Like, additive, lse_dtype
from .attention_rows import FormOf

CPU_ROWS = 256  # queries of a range on a CPU
MASK_NUMEL = 2**27  # of a range's mask elsewhere


def rows_of(q: Like, k: Like, documents: Like, is_cpu: bool = False) -> int:
    """Return the number of queries of a range."""
    if is_cpu:
        return CPU_ROWS
    return min(q.shape[2], max(128, MASK_NUMEL // max(1, documents.shape[0] * k.shape[2])))


def forward(
    form_of: FormOf, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, first: int,
    documents: Tensor, of_keys: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (output, log-sum-exp); 0 and -inf for a query that has no key of its document."""
    out = q.new_zeros(*q.shape[:3], v.shape[-1])
    lse = q.new_full(q.shape[:3], float("-inf"), dtype=lse_dtype(q.dtype))
    for rows, columns, own in _ranges(q, k, mask, causal, first, documents, of_keys):
        part = _part(q, rows), _part(k, columns), _part(v, columns), own, False
        results = form_of(*part).forward(*part, scale)
        for whole, found in zip((out, lse), results):
            _part(whole, rows).copy_(found)
    return out, lse


def backward(
    form_of: FormOf, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None,
    causal: bool, scale: float, first: int, lse_is_exact: bool, documents: Tensor, of_keys: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v. `lse_is_exact`: as in attention_rows.py."""
    dq, wide = torch.zeros_like(q), lse_dtype(q.dtype)
    dk, dv = (torch.zeros_like(x, dtype=wide) for x in (k, v))
    for rows, columns, own in _ranges(q, k, mask, causal, first, documents, of_keys):
        of_rows = (_part(x, rows) for x in (grad, q))
        results = (_part(x, rows) for x in (out, lse))
        part = *of_rows, _part(k, columns), _part(v, columns), *results, own, False, scale, 0, lse_is_exact
        found = attention_rows.backward(form_of, *part)
        _part(dq, rows).copy_(found[0])
        _part(dk, columns).add_(found[1])
        _part(dv, columns).add_(found[2])
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _ranges(
    q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, first: int, documents: Tensor, of_keys: Tensor
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield ranges of the queries with those of the keys that they may attend to, neither empty, and their masks."""
    for start in range(0, q.shape[2], size := rows_of(q, k, documents, q.is_cpu)):
        rows = slice(start, min(start + size, q.shape[2]))
        columns = slice(0, min(k.shape[2], first + rows.stop) if causal else k.shape[2])
        own = documents[:, rows]
        if q.is_cpu:
            columns = _of_documents(own, of_keys[:, columns])
        if columns.start == columns.stop:
            continue
        keep = own.unsqueeze(-1) == of_keys[:, columns].unsqueeze(-2)
        if causal:
            places = slice(first + start, first + rows.stop)
            at = [torch.arange(x.start, x.stop, device=q.device) for x in (places, columns)]
            keep &= at[1] <= at[0].unsqueeze(-1)
        yield rows, columns, _joined(keep.unsqueeze(1), mask, rows, columns, q.dtype)


def _of_documents(own: Tensor, of_keys: Tensor) -> slice:
    """Return the range of the keys that may be of the queries' documents in some sample."""
    low, high = own.amin(-1, keepdim=True), own.amax(-1, keepdim=True)
    found = ((of_keys >= low) & (of_keys <= high)).any(0).nonzero()
    return slice(int(found[0]), int(found[-1]) + 1) if len(found) else slice(0, 0)


def _joined(keep: Tensor, mask: Tensor | None, rows: slice, columns: slice, dtype: torch.dtype) -> Tensor:
    """Return a range's mask, added to the scores, with what another mask says of it."""
    if mask is None:
        return additive(keep, dtype)
    mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    mask = _part(mask, rows) if mask.shape[2] > 1 else mask
    mask = mask[..., columns] if mask.shape[3] > 1 else mask
    return mask.masked_fill(keep.logical_not(), float("-inf"))


def _part(x: Tensor, of: slice) -> Tensor:
    """Return some of the queries or keys of a tensor (b, h, s, ...)."""
    return x.narrow(2, of.start, of.stop - of.start)
