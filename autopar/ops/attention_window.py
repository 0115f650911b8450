"""Attention within a window: a query attends to the keys that are less than `window` places away from it.

Under a causal mask those are its own and the window - 1 keys before it, else as many on either side. Queries are served
range by range with the keys that their windows reach, under a mask of the range alone (attention_ranges.py), so no
tensor of all pairs exists and a range of n queries costs n + window keys, or n + 2 window. Ranges in the middle of a
sequence have one mask among them. Places count as the number of the first query, `first`, has them: it is negative
where the keys begin behind it.

Tensors are those of autopar/ops/attention_forms.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .attention_forms import Like
from .attention_ranges import added

CPU_ROWS = 256  # queries of a range on a CPU
FEWEST_ROWS, MOST_ROWS = 512, 2048  # and elsewhere, where a range takes launches: as many as its window has


def rows_of(window: int, is_cpu: bool = False) -> int:
    """Return the number of queries of a range."""
    return CPU_ROWS if is_cpu else min(MOST_ROWS, max(FEWEST_ROWS, 1 << (window - 1).bit_length()))


def closes_some(window: int, q: Like, k: Like, causal: bool, first: int) -> bool:
    """Return whether a window closes keys that are open without it, or queries are before the first key, which other
    causal calls do not say."""
    if not window:
        return False
    if causal and first < 0:
        return True
    last_key, last = k.shape[2] - 1, first + q.shape[2] - 1
    return last >= window or (not causal and last_key - first >= window)


def reach(window: int, causal: bool, places: range, keys: int) -> slice:
    """Return which of so many keys the queries at these places may attend to."""
    start = min(max(0, places.start - window + 1), keys)
    return slice(start, max(start, min(keys, places.stop if causal else places.stop + window - 1)))


def kept(window: int, causal: bool, places: range, columns: slice, device: torch.device) -> Tensor:
    """Return which keys each query keeps, (rows, columns)."""
    queries, keys = (torch.arange(x.start, x.stop, device=device) for x in (places, columns))
    queries = queries.unsqueeze(-1)
    keep = keys > queries - window
    keep &= keys <= queries if causal else keys < queries + window
    return keep


@dataclass
class Kept:
    """Remembers the last mask that was made: ranges in the middle have the same one."""

    form: tuple[int, int, int] | None = None
    mask: Tensor | None = None


@dataclass(frozen=True)
class WindowRange:
    """Some queries, at `places`, and the keys that their windows reach."""

    rows: slice
    columns: slice
    places: range
    window: int
    causal: bool
    device: torch.device
    last: Kept

    def mask(self, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the range's mask, added to the scores, with what another mask says of it."""
        if mask is not None:
            return added(self._keep(), mask, self.rows, self.columns, dtype)
        form = len(self.places), self.columns.stop - self.columns.start, self.places.start - self.columns.start
        if self.last.form != form or self.last.mask is None:
            self.last.mask = None  # before the next one is made
            self.last.form, self.last.mask = form, added(self._keep(), None, self.rows, self.columns, dtype)
        return self.last.mask

    def _keep(self) -> Tensor:
        return kept(self.window, self.causal, self.places, self.columns, self.device).unsqueeze(0).unsqueeze(0)


def ranges(q: Tensor, k: Tensor, causal: bool, first: int, window: int) -> Iterator[WindowRange]:
    """Iterate over ranges of the queries with the keys that they may attend to."""
    last = Kept()
    for start in range(0, q.shape[2], size := rows_of(window, q.is_cpu)):
        rows = slice(start, min(start + size, q.shape[2]))
        places = range(first + rows.start, first + rows.stop)
        columns = reach(window, causal, places, k.shape[2])
        yield WindowRange(rows, columns, places, window, causal, q.device, last)
