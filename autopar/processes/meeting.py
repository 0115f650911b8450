"""Ranks meet at the store of the world before a collective that could not be given up half way.

A rank that waits there can be told of a failure meanwhile, sees who is missing, and can leave again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch.distributed as dist

from .. import _torch
from .calls import Call

BLOCK = 128  # ranks that are counted together
SECONDS_BETWEEN_LOOKS, MOST_SECONDS_BETWEEN_LOOKS = 0.5, 4.0


class Meeting:
    """Holds a meeting of some ranks under a key, which this rank comes to now. No two meetings have one key.

    Ranks are counted by blocks, and full blocks by the last of each, so that who is missing among thousands is found
    in some dozen questions to the store, which all the others ask too."""

    def __init__(self, key: str, ranks: Sequence[int]):
        self.store, self.key, self.ranks, self.rank = _torch.default_store(), key, ranks, dist.get_rank()
        self.block = ranks.index(self.rank) // BLOCK
        self.store.set(f"{key}/{self.rank}", "here")
        if self.store.add(f"{key}/block {self.block}", 1) == len(self._members(self.block)):
            self.store.set(f"{key}/full {self.block}", "here")
            if self.store.add(key, 1) == self._blocks:
                self.store.set(f"{key}/all", "here")

    @property
    def _blocks(self) -> int:
        return -(-len(self.ranks) // BLOCK)

    def _members(self, block: int) -> Sequence[int]:
        return self.ranks[block * BLOCK : (block + 1) * BLOCK]

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
        """Return ranks that have not come: all, or of a large meeting those of the first blocks that are not full."""
        found: list[int] = []
        for block in self._without("full", range(self._blocks)):
            found += self._without("", self._members(block))
            if len(found) >= BLOCK:
                break
        return found

    def _without(self, kind: str, numbers: Sequence[int]) -> Iterator[int]:
        """Yield the numbers for which there is no key, by asking for halves in which one is missing."""
        keys = [f"{self.key}/{kind} {number}" if kind else f"{self.key}/{number}" for number in numbers]
        if self.store.check(keys):
            return
        if len(numbers) == 1:
            yield numbers[0]
            return
        half = len(numbers) // 2
        yield from self._without(kind, numbers[:half])
        yield from self._without(kind, numbers[half:])

    def leave(self) -> None:
        """Let the meeting wait for this rank again."""
        self.store.delete_key(f"{self.key}/{self.rank}")
        if self.store.add(f"{self.key}/block {self.block}", -1) == len(self._members(self.block)) - 1:
            self.store.delete_key(f"{self.key}/full {self.block}")
            self.store.add(self.key, -1)


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
