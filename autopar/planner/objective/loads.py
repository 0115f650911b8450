"""Add up how busy a pass keeps its streams, and the seconds that it takes at least for that.

Stream 0 computes, each other one is a class of links (autopar/planner/problem/multipliers.py). No play of the pass
(autopar/planner/objective/player.py) ends before its busiest stream does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..problem.multipliers import drag


@dataclass(frozen=True)
class Load:
    """Seconds of one phase, by stream: of compute and of collectives that it waits for, and of those beside it; and of
    the link to the `host`, beside which nothing goes slower."""

    waited: np.ndarray
    hidden: np.ndarray
    host: float = 0.0

    @classmethod
    def empty(cls, streams: int) -> Load:
        """Return the load of so many streams that do nothing."""
        return cls(np.zeros(streams), np.zeros(streams))

    @property
    def total(self) -> float:
        """Return the seconds of all streams together."""
        return float(self.waited.sum() + self.hidden.sum()) + self.host

    def add(self, split: tuple[float, ...], seconds: float, is_hidden: bool) -> None:
        """Add a transfer that spends these shares of its seconds on the streams."""
        for stream, share in enumerate(split):
            if share:
                (self.hidden if is_hidden else self.waited)[stream] += seconds * share

    def with_compute(self, seconds: float) -> Load:
        """Return the load with so many more seconds of compute, whose stream is the first."""
        waited = self.waited.copy()
        waited[0] += seconds
        return Load(waited, self.hidden, self.host)

    def __add__(self, other: Load) -> Load:
        return Load(self.waited + other.waited, self.hidden + other.hidden, self.host + other.host)

    def rows(self, overlap: float) -> np.ndarray:
        """Return the seconds that each stream needs: first the one that computes and waits, then the links."""
        loss = drag(overlap, len(self.hidden) - 1)
        main = self.waited.sum() + self.hidden[0] + loss * self.hidden[1:].sum()
        return np.concatenate([[main], self.waited[1:] + self.hidden[1:]])

    def seconds(self, overlap: float) -> float:
        """Return what the busiest stream needs."""
        rows = self.rows(overlap)
        return max(float(rows.max()), self.host) if overlap else float(rows[0]) + self.host


@dataclass
class PhaseLoads:
    """The load of a phase in every pass, and what one pass of a step carries besides (`once`, its seconds whole)."""

    every: Load
    once: Load

    @classmethod
    def empty(cls, streams: int) -> PhaseLoads:
        """Return the loads of so many streams that do nothing."""
        return cls(Load.empty(streams), Load.empty(streams))

    def of(self, is_once: bool) -> Load:
        """Return the load of a pass; `is_once`: of the one that carries what is moved once a step."""
        return self.every + self.once if is_once else self.every
