"""Find out that a GPU stands still in a collective, and why.

On a GPU the program runs ahead of the device: a collective that waits for a rank that does not come raises nothing on
the host, which stops at the next number that it reads, until NCCL's own watchdog takes the process down after minutes.
So each graph call leaves a mark on the stream behind it, and a thread of its own looks at the oldest one that the
device has not reached. Where it stays, the others are asked where they are, as on gloo: who is gone is named at once,
who does not come after AUTOPAR_TIMEOUT_S. Then the error is printed, since the program may be where nothing can be
raised, what NCCL's flight recorder knows is written to the rank's record, and the communicators are aborted, which
wakes the program up; the next call of the model raises the same error. A process that does not wake up is ended.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from .. import _torch
from . import process_groups
from .causes import Cause, Progress
from .patience import Patience

if TYPE_CHECKING:
    from .watch import Watch

WAKING_SECONDS = 20.0  # of a program whose communicators were aborted
EXIT_CODE = 1


class Mark(Protocol):
    """A place in the device's work, as a CUDA event is."""

    def query(self) -> bool:
        """Return whether the device has reached it."""


def mark_of_cuda() -> Mark:
    """Return a mark on the current stream behind all that was started there."""
    event = torch.cuda.Event()
    event.record()
    return event


@dataclass(frozen=True)
class Beats:
    """Holds how a heartbeat makes marks, wakes the program up and ends it. Tests have their own."""

    mark: Callable[[], Mark] = mark_of_cuda
    abort: Callable[[], None] = _torch.abort_groups
    end: Callable[[int], object] = os._exit
    waking_seconds: float = WAKING_SECONDS


class Heartbeat:
    """Watches the marks of one process where `is_needed`: collectives of gloo fail by themselves. `standing`: what the
    flight recorder knew of at a failure."""

    def __init__(self, watch: Watch, is_needed: bool, beats: Beats | None = None):
        self.watch, self.is_needed, self.beats = watch, is_needed, beats or Beats()
        self.marks: deque[tuple[Mark, Progress]] = deque()
        self.since = time.monotonic()  # since when the oldest mark is waited for
        self.longest_seconds = 0.0  # that the device has taken for a call
        self.standing: list[str] = []
        if is_needed:
            threading.Thread(target=self._look, name="autopar heartbeat", daemon=True).start()

    def mark(self, call: int, step: int, doing: str) -> None:
        """Leave a mark behind a call of a graph."""
        if self.is_needed:
            if not self.marks:
                self.since = time.monotonic()
            self.marks.append((self.beats.mark(), Progress(call, 1, step, doing, doing)))

    def at(self) -> Progress | None:
        """Return the oldest call that the device has not ended, None if there is none."""
        while self.marks and self.marks[0][0].query():
            self.marks.popleft()
            self.longest_seconds = max(self.longest_seconds, time.monotonic() - self.since)
            self.since = time.monotonic()
        return self.marks[0][1] if self.marks else None

    def _look(self) -> None:
        """Look at the oldest mark from time to time, until a rank fails or the world ends."""
        patience, before = self._patience(), None
        while self.watch.world() is not None and self.watch.world() is dist.group.WORLD:
            time.sleep(patience.seconds)
            here = self.at()
            if here != before:
                patience, before = self._patience(), here
            elif here is not None and (cause := self.watch.cause or self._cause(patience, here)) is not None:
                return self._end(cause, here)

    def _patience(self) -> Patience:
        return Patience(self.watch.peers, range(self.watch.peers.world))

    def _cause(self, patience: Patience, here: Progress) -> Cause | None:
        """Return why the device stands at a call; None while it may still be on its way, or where no rank keeps it
        waiting: it may be at something of the program's own, and NCCL has a limit too."""
        limit = process_groups.timeout_seconds()
        limit = process_groups.FIRST_STEP * limit if here.step <= 1 else limit
        if time.monotonic() - self.since < max(limit, process_groups.STEPS * self.longest_seconds):
            return patience.look(here)
        cause = self.watch.find_cause(here, range(self.watch.peers.world), timed_out=True)
        return cause if cause.kind != "unknown" else None

    def _end(self, cause: Cause, here: Progress) -> None:
        """Say why the device stands, wake the program up, and end it if it does not."""
        watch = self.watch
        self.standing = _torch.collectives_on_their_way()
        watch.tell(cause, range(watch.peers.world))
        where = f" (on the device: {self.standing[0]})" if self.standing else ""
        print(f"rank {watch.peers.rank}: {watch.error(cause, here)}{where}", file=sys.stderr, flush=True)
        self.beats.abort()
        end = time.monotonic() + self.beats.waking_seconds
        while watch.failed_at is None:  # the program has not learned of it
            if time.monotonic() > end:
                self.beats.end(EXIT_CODE)
                return
            time.sleep(0.1)
