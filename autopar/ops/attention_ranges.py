"""Attention of queries that are served range by range, each with some of the keys under a small mask of its own.

A mask is made for a range and dropped behind it, so none of all pairs exists. Gradients of keys and values add up in
the type of the log-sum-exp. Which keys a range has, and what its mask says of them, is the matter of
attention_documents.py and attention_window.py.

Tensors are those of autopar/ops/attention_forms.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from . import attention_rows
from .attention_forms import lse_dtype
from .attention_rows import FormOf


class Range(Protocol):
    """Some queries and the keys that they may attend to."""

    @property
    def rows(self) -> slice:
        """Return the queries."""

    @property
    def columns(self) -> slice:
        """Return the keys."""

    def mask(self, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the range's mask, added to the scores, with what another mask of all queries and keys says of it."""


def forward(
    form_of: FormOf, ranges: Iterable[Range], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return (output, log-sum-exp); 0 and -inf for a query that has no key."""
    outs, lses = zip(*[_served(form_of, range_, q, k, v, mask, scale) for range_ in ranges])
    return _joined(outs), torch.cat(lses, 2)


def _served(
    form_of: FormOf, range_: Range, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return (output, log-sum-exp) of a range's queries."""
    query = part(q, range_.rows)
    if is_empty(range_):
        none = q.new_full(query.shape[:3], float("-inf"), dtype=lse_dtype(q.dtype))
        return q.new_zeros(*query.shape[:3], v.shape[-1]), none
    keys, values = (part(x, range_.columns) for x in (k, v))
    own = range_.mask(mask, q.dtype)
    form = form_of(query, keys, values, own, False, at=_at(range_))
    return form.forward(query, keys, values, own, False, scale)


def backward(
    form_of: FormOf,
    ranges: Iterable[Range],
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    scale: float,
    lse_is_exact: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v. `lse_is_exact`: as in attention_rows.py."""
    sums = [torch.zeros_like(x, dtype=lse_dtype(q.dtype)) for x in (k, v)]
    dq = [_gradient(form_of, range_, grad, q, k, v, out, lse, mask, scale, lse_is_exact, sums) for range_ in ranges]
    return _joined(dq), sums[0].to(k.dtype), sums[1].to(v.dtype)


def _gradient(
    form_of: FormOf,
    range_: Range,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    scale: float,
    lse_is_exact: bool,
    sums: Sequence[Tensor],
) -> Tensor:
    """Return the gradient of a range's queries, and add those of its keys and values to `sums`."""
    dy, query, of_out, of_lse = (part(x, range_.rows) for x in (grad, q, out, lse))
    if is_empty(range_):
        return torch.zeros_like(query)
    keys, values = (part(x, range_.columns) for x in (k, v))
    own, form = range_.mask(mask, q.dtype), partial(form_of, at=_at(range_))
    dq, *of_columns = attention_rows.backward(
        form, dy, query, keys, values, of_out, of_lse, own, False, scale, 0, lse_is_exact
    )
    for whole, found in zip(sums, of_columns):
        part(whole, range_.columns).add_(found)
    return dq


def is_empty(range_: Range) -> bool:
    """Return whether the queries of a range have no key."""
    return range_.columns.start == range_.columns.stop


def added(keep: Tensor, mask: Tensor | None, rows: slice, columns: slice, dtype: torch.dtype) -> Tensor:
    """Return the mask of a range, added to the scores, that keeps what `keep` (b, h, rows, columns) says, with what
    another mask of all queries and keys says of it."""
    if mask is None:
        return torch.zeros_like(keep, dtype=dtype).masked_fill_(keep.logical_not(), float("-inf"))
    mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    mask = part(mask, rows) if mask.shape[2] > 1 else mask
    mask = some(mask, columns) if mask.shape[3] > 1 else mask
    return mask.masked_fill(keep.logical_not(), float("-inf"))


def part(x: Tensor, of: slice) -> Tensor:
    """Return some of the queries or keys of a tensor (b, h, s, ...)."""
    return x.narrow(2, of.start, of.stop - of.start)


def some(x: Tensor, of: slice) -> Tensor:
    """Return some of what is in the last dim."""
    return x.narrow(-1, of.start, of.stop - of.start)


def from_place(mask: Tensor, row: int, column: int) -> Tensor:
    """Return a view of a mask, of all four dims, from this query and this key on."""
    mask = mask.view((1,) * (4 - mask.dim()) + tuple(mask.shape))
    mask = mask.narrow(2, row, mask.shape[2] - row) if mask.shape[2] > 1 else mask
    return mask.narrow(3, column, mask.shape[3] - column) if mask.shape[3] > 1 else mask


def _at(range_: Range) -> tuple[int, int]:
    """Return the places of the first query and the first key."""
    return range_.rows.start, range_.columns.start


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return ranges of the queries one after the other, (b, h, s, d) stored as (b, s, h, d)."""
    return parts[0] if len(parts) == 1 else torch.cat([x.transpose(1, 2) for x in parts], 1).transpose(1, 2)
