"""Bands: masks that keep keys by how far they are from their query, as causal masks and windows do.

A band keeps a key where `lowest <= query - key <= highest`. The canonical attention says a band that is causal, lowest
0, or as wide on both sides: of a window of w keys the farthest is w - 1 places away.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .constant_values import one_sample


@dataclass(frozen=True)
class Band:
    """Keeps keys from so far in front of the query (a negative distance) to so far behind; None: any."""

    lowest: int | None = None
    highest: int | None = None

    @property
    def causal(self) -> bool:
        """Return whether no key in front of its query is kept, and its own may be."""
        return self.lowest == 0

    @property
    def window(self) -> int:
        """Return the number of keys from a query's own to the farthest, 0 for all."""
        return 0 if self.highest is None else self.highest + 1

    @property
    def is_said(self) -> bool:
        """Return whether `causal` and `window` say all of it."""
        if self.highest is not None and self.highest < 0:
            return False
        return (
            self.causal or (self.lowest is None) == (self.highest is None) and self.lowest in (None, -self.window + 1)
        )

    @classmethod
    def of(cls, causal: bool, window: int) -> Band:
        """Return the band that an attention's arguments say."""
        return cls(0 if causal else 1 - window if window else None, window - 1 if window else None)


OPEN, TRIANGLE = Band(), Band(0)


def joined(bands: Iterable[Band]) -> Band:
    """Return what all of some bands keep."""
    bands = list(bands)
    lowest = max((band.lowest for band in bands if band.lowest is not None), default=None)
    return Band(lowest, min((band.highest for band in bands if band.highest is not None), default=None))


def band_of(value: torch.Tensor) -> Band | None:
    """Return the band that a mask is, of booleans or of numbers that are added to the scores; None if it is none."""
    keep = one_sample(value)
    if keep.dtype != torch.bool:
        if not bool(((keep == 0) | (keep <= torch.finfo(keep.dtype).min / 2)).all()):
            return None
        keep = keep == 0
    if bool(keep.all()):
        return OPEN
    if keep.dim() < 2 or keep.shape[-2] != keep.shape[-1]:
        return None
    one, size = keep[(0,) * (keep.dim() - 2)], keep.shape[-1]
    in_front, behind = int(one[0].sum()), int(one[:, 0].sum())  # of the first query, and queries of the first key
    if not in_front or not behind:
        return None
    wanted = torch.ones(size, size, dtype=torch.bool).tril(in_front - 1).triu(1 - behind)
    if not bool((keep == wanted).all()):
        return None
    return Band(1 - in_front if in_front < size else None, behind - 1 if behind < size else None)


def band_of_order(low: torch.Tensor, high: torch.Tensor, is_strict: bool) -> Band | None:
    """Return the band that keeps a key where a side is lower than the other, or equal if it is not strict; None if it
    is none. A side is of keys, in the last dim, or of queries, in the one before."""
    if low.max() < high.min() or low.max() == high.min() and not is_strict:
        return OPEN
    if _is_of_keys(low) and _is_of_queries(high) and not is_strict:
        keys = low.flatten()
        if torch.equal(keys, high.flatten()) and bool((keys.diff() > 0).all()):
            return TRIANGLE
    return band_of_difference(low, high, None, -int(is_strict))


def band_of_difference(a: torch.Tensor, b: torch.Tensor, least: int | None, most: int | None) -> Band | None:
    """Return the band that keeps a key where a - b is not less than `least` nor more than `most`; None if it is none. A
    side counts the places of keys, in the last dim, the other those of queries, in the one before."""
    of_queries = _is_of_keys(b) and _is_of_queries(a)
    if not of_queries and not (_is_of_keys(a) and _is_of_queries(b)):
        return None
    sides = a.flatten(), b.flatten()
    if not all(not x.is_floating_point() and bool((x.diff() == 1).all()) for x in sides):
        return None
    shift = int(sides[0][0] - sides[1][0])
    ends = [None if end is None else end - shift for end in (least, most)]
    if of_queries:
        return Band(*ends)
    return Band(*(None if end is None else -end for end in reversed(ends)))


def _is_of_keys(side: torch.Tensor) -> bool:
    return side.shape[-1:].numel() == side.numel()


def _is_of_queries(side: torch.Tensor) -> bool:
    return side.dim() > 1 and side.shape[-2] == side.numel()
