"""Bytes that attention block by block holds beside its results: counted by running it on tensors without memory.

What a block needs does not grow with the sequence, so a few blocks tell it (`_of_blocks`), once for each shape of a
block; only the sums of keys' and values' gradients in the wide type are as long as the sequence.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from ..utils.live_bytes import LiveBytes
from . import attention_blocks
from .attention_dropout import WeightDropout
from .attention_forms import Like, lse_dtype

ROW_BLOCKS, COLUMN_BLOCKS = 2, 3  # of the small case: the second ones meet what the first ones leave
Shape = tuple[int, ...]


def forward_bytes(
    q: Like, k: Like, v: Like, mask: Like | None, causal: bool, softcap: float, dropout: WeightDropout | None
) -> int:
    """Return the bytes of a forward."""
    return _of_blocks(*_small(q, k, v, mask, dropout), causal, softcap, dropout, False, False)


def backward_bytes(
    q: Like,
    k: Like,
    v: Like,
    mask: Like | None,
    causal: bool,
    softcap: float,
    dropout: WeightDropout | None,
    of_mask: bool,
) -> int:
    """Return the bytes of a backward, without the gradient of the mask."""
    inside = _of_blocks(*_small(q, k, v, mask, dropout), causal, softcap, dropout, True, of_mask)
    numel, item, wide = sum(math.prod(x.shape) for x in (k, v)), q.dtype.itemsize, lse_dtype(q.dtype).itemsize
    sums = numel * wide if item < wide else 0
    return max(inside + sums - (numel * item if sums else 0), sums)


def _small(
    q: Like, k: Like, v: Like, mask: Like | None, dropout: WeightDropout | None
) -> tuple[Shape, Shape, Shape, Shape | None, torch.dtype, torch.dtype | None]:
    """Return the shapes of a few blocks of the same attention."""
    block = attention_blocks.BLOCK
    rows, columns = min(q.shape[2], ROW_BLOCKS * block), min(k.shape[2], COLUMN_BLOCKS * block)

    def cut(shape: Sequence[int], length: int) -> Shape:
        return (*shape[:2], length, shape[3])

    of_mask = None
    if mask is not None:
        *before, last = mask.shape
        of_mask = (*before[:-1], *(min(n, rows) for n in before[-1:]), min(last, columns))
    given = cut(q.shape, rows), cut(k.shape, columns), cut(v.shape, columns), of_mask
    return *given, q.dtype, None if mask is None else mask.dtype


@functools.cache
def _of_blocks(
    q: Shape,
    k: Shape,
    v: Shape,
    mask: Shape | None,
    dtype: torch.dtype,
    mask_dtype: torch.dtype | None,
    causal: bool,
    softcap: float,
    dropout: WeightDropout | None,
    backward: bool,
    of_mask: bool,
) -> int:
    """Return the bytes of a small case beside its results, and beside sums in the wide type."""

    def empty(shape: Shape) -> torch.Tensor:
        return torch.empty(shape[0], shape[2], shape[1], shape[3], dtype=dtype, device="meta").transpose(1, 2)

    added = (
        None
        if mask is None
        else torch.empty(mask, dtype=dtype if mask_dtype == torch.bool else mask_dtype, device="meta")
    )
    first = max(0, k[2] - q[2]) if causal else 0
    wide = lse_dtype(dtype)
    queries, keys, values = empty(q), empty(k), empty(v)
    if not backward:
        with LiveBytes([t for t in (queries, keys, values, added) if t is not None]) as count:
            results = attention_blocks.forward(
                queries, keys, values, added, causal, 1.0, first=first, softcap=softcap, dropout=dropout
            )
        return count.peak_bytes - sum(r.numel() * r.element_size() for r in results)
    lse = torch.empty(q[:3], dtype=wide, device="meta")
    dmask = torch.zeros(mask, dtype=wide, device="meta") if of_mask and mask is not None else None
    grad, out = empty((*q[:3], v[3])), empty((*q[:3], v[3]))
    known = [t for t in (queries, keys, values, added, grad, out, lse, dmask) if t is not None]
    with LiveBytes(known) as count:
        attention_blocks.backward(
            grad,
            queries,
            keys,
            values,
            out,
            lse,
            added,
            causal,
            1.0,
            first=first,
            softcap=softcap,
            dmask=dmask,
            dropout=dropout,
            lse_is_exact=added is None or of_mask or mask_dtype == torch.bool or softcap != 0.0,
        )
    held = math.prod(q) * dtype.itemsize + (math.prod(k) + math.prod(v)) * wide.itemsize
    return count.peak_bytes - held
