"""Attention among documents that are packed into a row: a query attends to the keys of its own document.

A document is an integer that its queries and keys share. Queries are served range by range, each under a mask of its
own that is made of the integers (attention_ranges.py), so no mask of all pairs exists. A range has keys up to where a
causal mask closes them, of a window those that it reaches. On a CPU, where integers are read without waiting, it has
those from the first to the last whose integer is between the range's own, so documents cost what they need, and nothing
is computed where a device has no key of them. A GPU is never waited for, and computes what the mask closes.

Tensors are those of autopar/ops/attention_forms.py; documents are (b, s) and (b, t), or (1, s) and (1, t).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from . import attention_window
from .attention_forms import Like
from .attention_ranges import added, some

CPU_ROWS = 256  # queries of a range on a CPU
ROWS = 2048  # and elsewhere, if its mask is not larger than this
MASK_NUMEL = 2**27


def rows_of(k: Like, documents: Like, is_cpu: bool = False, window: int = 0) -> int:
    """Return the number of queries of a range."""
    if is_cpu:
        return CPU_ROWS
    most = attention_window.rows_of(window) if window else ROWS
    keys = min(k.shape[2], most + 2 * window) if window else k.shape[2]
    return max(1, min(most, MASK_NUMEL // max(1, documents.shape[0] * keys)))


@dataclass(frozen=True)
class DocumentRange:
    """Some queries, at `places`, and the keys that they may attend to, of all `documents` and `of_keys`."""

    rows: slice
    columns: slice
    places: range
    documents: Tensor
    of_keys: Tensor
    causal: bool
    window: int

    def mask(self, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the range's mask, added to the scores, with what another mask says of it."""
        keep = some(self.documents, self.rows).unsqueeze(-1) == some(self.of_keys, self.columns).unsqueeze(-2)
        if self.window:
            keep &= attention_window.kept(self.window, self.causal, self.places, self.columns, keep.device)
        elif self.causal:
            at = [torch.arange(x.start, x.stop, device=keep.device) for x in (self.places, self.columns)]
            keep &= at[1] <= at[0].unsqueeze(-1)
        return added(keep.unsqueeze(1), mask, self.rows, self.columns, dtype)


def ranges(
    q: Tensor, k: Tensor, causal: bool, first: int, documents: Tensor, of_keys: Tensor, window: int = 0
) -> Iterator[DocumentRange]:
    """Iterate over ranges of the queries with those of the keys that they may attend to."""
    for start in range(0, q.shape[2], size := rows_of(k, documents, q.is_cpu, window)):
        rows = slice(start, min(start + size, q.shape[2]))
        places = range(first + rows.start, first + rows.stop)
        columns = slice(0, max(0, min(k.shape[2], places.stop)) if causal else k.shape[2])
        if window:
            columns = attention_window.reach(window, causal, places, k.shape[2])
        if q.is_cpu:
            columns = _of_documents(some(documents, rows), some(of_keys, columns), columns.start)
        yield DocumentRange(rows, columns, places, documents, of_keys, causal, window)


def _of_documents(own: Tensor, of_keys: Tensor, start: int) -> slice:
    """Return the range of the keys, the first of which is number `start`, that may be of the queries' documents in some
    sample."""
    low, high = own.amin(-1, keepdim=True), own.amax(-1, keepdim=True)
    found = ((of_keys >= low) & (of_keys <= high)).any(0).nonzero()
    return slice(start + int(found[0]), start + int(found[-1]) + 1) if len(found) else slice(start, start)
