"""Dropout of the weights of an attention, drawn block by block.

A weight (b, h, i, j) is dropped where `autopar::dropout` of all weights would drop it, as that depends on its place
among them alone (counter_rng.py): no tensor of all weights exists, whatever part of them a device has, and a backward
draws again what it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .counter_rng import ALL, kept, key_and_start


@dataclass(frozen=True)
class WeightDropout:
    """Drops weights (b, h, s, t), `dropped` of ALL; the index of the first one here is `start`, those of others follow
    by `strides`."""

    key: int
    start: int
    strides: tuple[int, ...]
    dropped: int

    @property
    def factor(self) -> float:
        """Return what a weight that is kept is multiplied by."""
        return ALL / (ALL - self.dropped) if self.dropped < ALL else 0.0

    def behind(self, row: int, column: int) -> WeightDropout:
        """Return the dropout of the weights from this query and this key on."""
        return replace(self, start=self.start + row * self.strides[2] + column * self.strides[3])

    def kept(self, samples: int, heads: int, rows: slice, columns: slice, device: torch.device) -> Tensor:
        """Return whether each weight (b, h, rows, columns) of a block is kept."""
        shape = samples, heads, rows.stop - rows.start, columns.stop - columns.start
        at = self.behind(rows.start, columns.start)
        return kept(shape, self.strides, at.start, self.key, self.dropped, device)


def weight_dropout(
    state: Tensor | None, p: float, stream: int, start: int, strides: Sequence[int] | None, micro_batch_step: int
) -> WeightDropout | None:
    """Return the dropout that an attention's arguments say, None if it drops nothing."""
    if state is None or strides is None:
        return None
    key, first = key_and_start(state, stream, start, micro_batch_step)
    return WeightDropout(key, first, tuple(strides), round(p * ALL))
