"""Wait for other ranks between steps for as long as they live.

There one may trace, plan or write for all, which takes as long as it takes; one that is gone or out of reach will not
come. So a rank that waits asks the others from time to time: who answers is waited for, who died is given up at once,
who has not answered for AUTOPAR_TIMEOUT_S is given up then.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from . import causes, process_groups
from .causes import Cause, Progress
from .peers import GONE, UNKNOWN, Peers

LOOKS = 8  # in AUTOPAR_TIMEOUT_S
LEAST_SECONDS, MOST_SECONDS = 0.25, 15.0  # between them


class Patience:
    """Holds since when other ranks have not answered, in one wait. `ranks`: those that are waited for."""

    def __init__(self, peers: Peers, ranks: Sequence[int]):
        self.peers, self.ranks = peers, ranks
        self.looked = time.monotonic()
        self.heard: dict[int, float] = {}  # when ranks that do not answer did so last, or the wait began

    @property
    def seconds(self) -> float:
        """Return how long to wait until the next look."""
        return min(max(process_groups.timeout_seconds() / LOOKS, LEAST_SECONDS), MOST_SECONDS)

    def look(self, here: Progress) -> Cause | None:
        """Ask some ranks, those again that did not answer before, and return why to wait no longer, if so."""
        before, self.looked = self.looked, time.monotonic()
        answers = self.peers.ask({}, [*self.heard]) | self.peers.ask({}, [r for r in self.ranks if r not in self.heard])
        for rank, answer in answers.items():
            if isinstance(answer, dict):
                self.heard.pop(rank, None)
            elif answer != UNKNOWN:
                self.heard.setdefault(rank, before)
        limit = process_groups.timeout_seconds()
        known = {
            rank: answer
            for rank, answer in answers.items()
            if (answer["cause"] if isinstance(answer, dict) else answer == GONE or self._silence(rank) >= limit)
        }
        return causes.found(known, self.peers.rank, here, self.peers.machines, waited=True) if known else None

    def _silence(self, rank: int) -> float:
        """Return for how many seconds a rank has not answered."""
        return self.looked - self.heard.get(rank, self.looked)
