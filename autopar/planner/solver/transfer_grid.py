"""Price the redistributions of one tensor, from every layout of its producer to every one that its consumers want.

Very many pairs of layouts share few sequences of steps (autopar/cost/transfer_prices.py): what is held by pair is the
number of its sequence alone, and at any prices the few sequences are priced first and pairs look theirs up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...cost.transfer_rows import IMPOSSIBLE
from ...ir.layout import Layout
from ..objective.pricer import Pricer


@dataclass(frozen=True)
class TransferGrid:
    """`rows` (source, target): the column of `table` (stream, column) with the seconds of the pair. There is no way
    where that is one of the `impossible` columns. `share`: by source, of how many of a step's passes move it. `casts`:
    seconds of casts by pair, None if there are none."""

    rows: np.ndarray
    table: np.ndarray
    impossible: tuple[int, ...]
    share: np.ndarray
    casts: np.ndarray | None

    @classmethod
    def of(
        cls,
        pricer: Pricer,
        tensor: tuple[int, int],
        slots: Sequence[int],
        sources: Sequence[Layout],
        targets: Sequence[Layout],
    ) -> TransferGrid:
        """Return the grid of a tensor that is read in these slots."""
        whole = pricer.problem.tensor_bytes[tensor]
        moved = [pricer.moved_bytes(*tensor, slots, p) for p in sources]
        rows, amounts = pricer.prices.rows(sources, targets), list(dict.fromkeys([whole, *moved]))
        if tensor in pricer.problem.staying:
            rows = np.where([[p == q for q in targets] for p in sources], rows, IMPOSSIBLE)
        tables = [pricer.table(bytes_, pricer.bucket_of(tensor[0], slots, bytes_)) for bytes_ in amounts]
        width, casts = tables[0].shape[1], None
        if len(amounts) > 1:
            rows = rows + np.array([amounts.index(bytes_) * width for bytes_ in moved])[:, None]
            casts = np.zeros(rows.shape)
            for i, (p, bytes_) in enumerate(zip(sources, moved)):
                if bytes_ != whole:
                    casts[i] = [pricer.cast_seconds(*tensor, p, q, bytes_) for q in targets]
        times = np.array([pricer.times(tensor[0], slots, p) for p in sources])
        impossible = tuple(IMPOSSIBLE + i * width for i in range(len(tables)))
        table = np.hstack(tables) if len(tables) > 1 else tables[0]
        return cls(rows, table, impossible, times / pricer.micro_batches, casts)

    @property
    def is_possible(self) -> np.ndarray:
        """Return whether there is a redistribution, by pair."""
        return np.logical_and.reduce([self.rows != column for column in self.impossible])

    def seconds(self, weights: np.ndarray | None = None) -> np.ndarray:
        """Return the seconds of an average pass by pair, those of each stream times its weight, inf where there is no
        way."""
        weights = np.ones(len(self.table)) if weights is None else weights
        each = weights @ self.table
        each[list(self.impossible)] = np.inf
        found = each[self.rows]
        if self.casts is not None:
            found += weights[0] * self.casts
        return found if (self.share == 1).all() else found * self.share[:, None]

    def chosen(self, sources: np.ndarray, targets: np.ndarray) -> TransferGrid:
        """Return the grid of some of the sources and of the targets alone, in this order."""
        at = np.ix_(sources, targets)
        casts = None if self.casts is None else self.casts[at]
        return replace(self, rows=self.rows[at], share=self.share[sources], casts=casts)
