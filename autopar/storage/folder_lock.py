"""One save at a time into a folder, whatever jobs share it: what one is writing looks to another like what a killed one
has left.

The lock is the operating system's, on a file in the folder, and ends with the process that has it. Where a file system
has no locks there is none.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path

from ..errors import CheckpointError

NAME = ".lock"
SECONDS_BETWEEN_LOOKS = 0.1


class FolderLock:
    """The lock of a folder, which this process has between `take` and `release`. Threads may release it for others."""

    def __init__(self, folder: Path):
        self.folder, self.is_held = folder, False
        self._file: TextIOWrapper | None = None

    def take(self, seconds: float) -> None:
        """Wait for the lock, for so long at the most. Raises CheckpointError that names the process that has it."""
        end = time.monotonic() + seconds
        while (holder := self._try()) is not None:
            if time.monotonic() >= end:
                raise CheckpointError(
                    f"{holder or 'another process'} is saving into {self.folder}, and has been for {seconds:g} s",
                    fix="give each run a folder of its own; AUTOPAR_TIMEOUT_S=seconds waits longer",
                )
            time.sleep(SECONDS_BETWEEN_LOOKS)

    @contextlib.contextmanager
    def if_free(self) -> Iterator[bool]:
        """Take the lock inside if nobody has it, and say whether."""
        with contextlib.suppress(OSError):
            self._try()
        try:
            yield self.is_held
        finally:
            self.release()

    def release(self) -> None:
        """Give the lock back, if this process has it."""
        file, self._file, self.is_held = self._file, None, False
        if file is not None:
            with contextlib.suppress(OSError):
                os.remove(file.name)  # while it is locked: who waits for it makes a new one
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # also for processes that were forked meanwhile
            file.close()

    def _try(self) -> str | None:
        """Take the lock if it is free, or where there are none, and return None; else the process that has it."""
        file = open(self.folder / NAME, "a+")  # noqa: SIM115, it is kept open
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return _read_and_close(file)
        except OSError:  # a file system without locks
            file.close()
            self.is_held = True
            return None
        if not _is_in_place(file):  # the one who had it has removed it
            file.close()
            return ""
        self._file, self.is_held = file, True
        with contextlib.suppress(OSError):  # a full disk
            file.truncate(0)
            file.write(f"process {os.getpid()} of {socket.gethostname()}")
            file.flush()
        return None


def _is_in_place(file: TextIOWrapper) -> bool:
    try:
        return os.path.samestat(os.stat(file.name), os.fstat(file.fileno()))
    except OSError:
        return False


def _read_and_close(file: TextIOWrapper) -> str:
    with file:
        file.seek(0)
        return file.read(300)
