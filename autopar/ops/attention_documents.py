"""Attention among documents that are packed into a row: a query attends to the keys of its own document.

A document is an integer that its queries and keys share. Queries are served range by range, each under a mask of its
own that is made of the integers and dropped behind it, so no mask of all pairs exists. A range has keys up to where a
causal mask closes them. On a CPU, where integers are read without waiting, it has those from the first to the last
whose integer is between the range's own, so documents cost what they need, and nothing is computed where a device has
no key of them. A GPU is never waited for, and computes what the mask closes.

Tensors are those of autopar/ops/attention_forms.py; documents are (b, s) and (b, t), or (1, s) and (1, t).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from . import attention_rows
from .attention_forms import Like, lse_dtype
from .attention_rows import FormOf

CPU_ROWS = 256  # queries of a range on a CPU
ROWS = 2048  # and elsewhere, if its mask is not larger than this
MASK_NUMEL = 2**27


def rows_of(k: Like, documents: Like, is_cpu: bool = False) -> int:
    """Return the number of queries of a range."""
    return CPU_ROWS if is_cpu else max(1, min(ROWS, MASK_NUMEL // max(1, documents.shape[0] * k.shape[2])))


def forward(
    form_of: FormOf,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    first: int,
    documents: Tensor,
    of_keys: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return (output, log-sum-exp); 0 and -inf for a query that has no key of its document."""
    found: list[tuple[Tensor, Tensor]] = []
    for range_ in _ranges(q, k, causal, first, documents, of_keys):
        query = _part(q, range_.rows)
        if range_.is_empty:
            none = q.new_full(query.shape[:3], float("-inf"), dtype=lse_dtype(q.dtype))
            found.append((q.new_zeros(*query.shape[:3], v.shape[-1]), none))
        else:
            keys, values = (_part(x, range_.columns) for x in (k, v))
            own = range_.mask(mask, documents, of_keys, q.dtype)
            form = form_of(query, keys, values, own, False, at=range_.at)
            found.append(form.forward(query, keys, values, own, False, scale))
            del own  # before the next one is made
    outs, lses = zip(*found)
    return _joined(outs), torch.cat(lses, 2)


def backward(
    form_of: FormOf,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    first: int,
    lse_is_exact: bool,
    documents: Tensor,
    of_keys: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v. `lse_is_exact`: as in attention_rows.py."""
    dk, dv = (torch.zeros_like(x, dtype=lse_dtype(q.dtype)) for x in (k, v))
    dq = []
    for range_ in _ranges(q, k, causal, first, documents, of_keys):
        dy, query, of_out, of_lse = (_part(x, range_.rows) for x in (grad, q, out, lse))
        if range_.is_empty:
            dq.append(torch.zeros_like(query))
            continue
        keys, values = (_part(x, range_.columns) for x in (k, v))
        own, form = range_.mask(mask, documents, of_keys, q.dtype), partial(form_of, at=range_.at)
        mine, *of_columns = attention_rows.backward(
            form, dy, query, keys, values, of_out, of_lse, own, False, scale, 0, lse_is_exact
        )
        dq.append(mine)
        for whole, found in zip((dk, dv), of_columns):
            _part(whole, range_.columns).add_(found)
        del own, mine, of_columns, found  # before the next ones are made
    return _joined(dq), dk.to(k.dtype), dv.to(v.dtype)


@dataclass(frozen=True)
class _Range:
    """Some queries and the keys that they may attend to; `place`: the number of the first query if that closes later
    keys."""

    rows: slice
    columns: slice
    place: int | None

    @property
    def at(self) -> tuple[int, int]:
        """Return the places of the first query and the first key."""
        return self.rows.start, self.columns.start

    @property
    def is_empty(self) -> bool:
        return self.columns.start == self.columns.stop

    def mask(self, mask: Tensor | None, documents: Tensor, of_keys: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the range's mask, added to the scores, with what another mask says of it."""
        keep = _some(documents, self.rows).unsqueeze(-1) == _some(of_keys, self.columns).unsqueeze(-2)
        if self.place is not None:
            places = slice(self.place, self.place + self.rows.stop - self.rows.start)
            at = [torch.arange(x.start, x.stop, device=keep.device) for x in (places, self.columns)]
            keep &= at[1] <= at[0].unsqueeze(-1)
        return _added(keep.unsqueeze(1), mask, self.rows, self.columns, dtype)


def _ranges(q: Tensor, k: Tensor, causal: bool, first: int, documents: Tensor, of_keys: Tensor) -> Iterator[_Range]:
    """Iterate over ranges of the queries with those of the keys that they may attend to."""
    for start in range(0, q.shape[2], size := rows_of(k, documents, q.is_cpu)):
        rows = slice(start, min(start + size, q.shape[2]))
        columns = slice(0, min(k.shape[2], first + rows.stop) if causal else k.shape[2])
        if q.is_cpu:
            columns = _of_documents(_some(documents, rows), _some(of_keys, columns))
        yield _Range(rows, columns, first + start if causal else None)


def _of_documents(own: Tensor, of_keys: Tensor) -> slice:
    """Return the range of the keys that may be of the queries' documents in some sample."""
    low, high = own.amin(-1, keepdim=True), own.amax(-1, keepdim=True)
    found = ((of_keys >= low) & (of_keys <= high)).any(0).nonzero()
    return slice(int(found[0]), int(found[-1]) + 1) if len(found) else slice(0, 0)


def _added(keep: Tensor, mask: Tensor | None, rows: slice, columns: slice, dtype: torch.dtype) -> Tensor:
    """Return a range's mask, added to the scores, with what another mask says of it."""
    if mask is None:
        return torch.zeros_like(keep, dtype=dtype).masked_fill_(keep.logical_not(), float("-inf"))
    mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    mask = _part(mask, rows) if mask.shape[2] > 1 else mask
    mask = _some(mask, columns) if mask.shape[3] > 1 else mask
    return mask.masked_fill(keep.logical_not(), float("-inf"))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return ranges of the queries one after the other, (b, h, s, d) stored as (b, s, h, d)."""
    return parts[0] if len(parts) == 1 else torch.cat([x.transpose(1, 2) for x in parts], 1).transpose(1, 2)


def _some(x: Tensor, of: slice) -> Tensor:
    """Return some of what is in the last dim."""
    return x.narrow(-1, of.start, of.stop - of.start)


def _part(x: Tensor, of: slice) -> Tensor:
    """Return some of the queries or keys of a tensor (b, h, s, ...)."""
    return x.narrow(2, of.start, of.stop - of.start)
