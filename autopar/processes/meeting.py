"""Ranks meet at the store of the world before a collective that could not be given up half way.

A rank that waits there can be told of a failure meanwhile, sees who is missing, and can leave again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from .. import _torch
from .calls import Call

SECONDS_BETWEEN_LOOKS, MOST_SECONDS_BETWEEN_LOOKS = 0.5, 4.0


class Meeting:
    """Holds a meeting of some ranks under a key, which this rank comes to now. No two meetings have one key."""

    def __init__(self, key: str, ranks: Sequence[int]):
        self.store, self.key, self.ranks, self.rank = _torch.default_store(), key, ranks, dist.get_rank()
        self.store.set(f"{key}/{self.rank}", "here")
        if self.store.add(key, 1) == len(ranks):
            self.store.set(f"{key}/all", "here")

    def is_complete(self, seconds: float) -> bool:
        """Return whether all have come, after so long at the most."""
        try:
            self.store.wait([f"{self.key}/all"], timedelta(seconds=max(seconds, 0.01)))
        except RuntimeError as error:
            if "timeout" not in str(error).lower():  # another's, such as of a killed worker of a DataLoader
                raise
            return False
        return True

    def missing(self) -> list[int]:
        """Return the ranks that have not come."""
        return [rank for rank in self.ranks if not self.store.check([f"{self.key}/{rank}"])]

    def leave(self) -> None:
        """Let the meeting wait for this rank again."""
        self.store.add(self.key, -1)
        self.store.delete_key(f"{self.key}/{self.rank}")


def meet(key: str, ranks: Sequence[int], seconds: float) -> None:
    """Wait until all ranks have come, for so long."""
    Meeting(key, ranks).is_complete(seconds)


def lost(key: str, ranks: Sequence[int], seconds: float = 3.0) -> list[int]:
    """Return the ranks that did not come to a meeting, or since then do not come to the store; none if it cannot be
    reached from here."""

    def find() -> list[int]:
        after = Meeting(f"{key}/failed", ranks)
        return [] if after.is_complete(seconds) else after.missing()

    asked = Call(find)
    with contextlib.suppress(RuntimeError):
        return asked.result if asked.is_over(2 * seconds) else []
    return []
