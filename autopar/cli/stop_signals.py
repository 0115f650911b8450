"""SIGTERM, Ctrl-C and SIGUSR1 let a run end after the step that it is in, with a checkpoint, and no process outlives
the one that started it. Kubernetes sends SIGTERM to the first process of a container, SLURM what `--signal` says to
every task of a step."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
REPEAT_SECONDS = 2.0  # in which a launcher passes on what the terminal has sent to all
SECONDS_BETWEEN_LOOKS = 1.0


class StopSignals:
    """A context that counts signals instead of ending the process. `received`: the first one, 0 before. A second one
    ends it at once, as does the first where nothing is worth waiting for (`waits` is False). `told`: called with the
    first."""

    def __init__(
        self,
        told: Callable[[int], None] = lambda number: None,
        waits: bool = True,
        numbers: Sequence[signal.Signals] = SIGNALS,
    ):
        self.received, self.told, self.waits, self.numbers, self.first = 0, told, waits, numbers, 0.0

    def __enter__(self) -> StopSignals:
        self.before = {number: signal.getsignal(number) for number in self.numbers}
        for number, handler in self.before.items():
            if handler is not signal.SIG_IGN:  # as shells say of SIGINT to background jobs
                signal.signal(number, self._handle)
        return self

    def __exit__(self, *error) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    @property
    def code(self) -> int:
        """Return the exit code of a process that ended by the signal, as shells count them."""
        return 128 + self.received

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received and time.monotonic() < self.first + REPEAT_SECONDS:
            return
        is_first = not self.received
        self.received, self.first = self.received or number, time.monotonic()
        if is_first:
            self.told(number)
        if not is_first or not self.waits:
            raise SystemExit(self.code)


def end_with_parent() -> None:
    """Let this process end within a second or two when the one that started it is gone in whatever way."""
    started, by = multiprocessing.parent_process(), os.getppid()  # a server may have forked it for another one

    def is_orphan() -> bool:
        return os.getppid() != by or (started is not None and not started.is_alive())

    threading.Thread(target=_end_when, args=(is_orphan,), name="autopar parent", daemon=True).start()


def _end_when(is_orphan: Callable[[], bool]) -> None:
    while not is_orphan():
        time.sleep(SECONDS_BETWEEN_LOOKS)
    os._exit(128 + signal.SIGHUP)  # at once: this process may be waiting for others in a collective
