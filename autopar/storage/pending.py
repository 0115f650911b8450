"""A checkpoint that is written while training goes on: one at a time, in a thread of each rank, without a collective.

A rank that has written its files leaves their digests beside them, or a word that it failed; rank 0 waits for those of
all and commits. What went wrong is raised on all ranks where they meet next.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch.distributed as dist

from ..errors import CheckpointError
from ..processes import agree, process_groups
from .checkpoint_folder import Place
from .durable import Digest, disk_errors, write_file
from .folder_lock import FolderLock
from .shards import Written

SECONDS_BETWEEN_LOOKS = 0.05


class _Pending(threading.Thread):
    """Holds one that is being written. A program that ends waits for the thread."""

    def __init__(
        self,
        files: Mapping[str, Written],
        place: Place,
        commit: Callable[[Mapping[str, Digest]], None],
        lock: FolderLock,
    ):
        super().__init__(name="autopar checkpoint")
        self.files, self.place, self.commit, self.lock = dict(files), place, commit, lock
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self._write()
        except Exception as error:
            self.error = error
        finally:
            self.lock.release()

    def _write(self) -> None:
        folder = self.place.unfinished
        try:
            with disk_errors(folder):
                digests = {}
                for name, file in self.files.items():
                    digest = file if isinstance(file, Digest) else file.write()
                    digests[name] = [digest.bytes_, digest.sha256]
                write_file(_done(folder, self.rank), json.dumps(digests).encode())
        except CheckpointError:
            with contextlib.suppress(OSError):
                _failed(folder, self.rank).touch()
            raise
        if self.rank == 0:
            self._commit(folder)

    def _commit(self, folder: Path) -> None:
        end = time.monotonic() + process_groups.FIRST_STEP * process_groups.timeout_seconds()
        found: dict[str, Digest] = {}
        for rank in range(self.ranks):
            while not _done(folder, rank).exists():
                if _failed(folder, rank).exists() or time.monotonic() > end:
                    raise CheckpointError(f"rank {rank} did not write its part of {self.place.final}")
                time.sleep(SECONDS_BETWEEN_LOOKS)
            with disk_errors(folder):
                found |= {name: Digest(*d) for name, d in json.loads(_done(folder, rank).read_text()).items()}
                _done(folder, rank).unlink()
        self.commit(found)


_pending: _Pending | None = None


def begin(
    files: Mapping[str, Written], place: Place, commit: Callable[[Mapping[str, Digest]], None], lock: FolderLock
) -> None:
    """Write this rank's files of a checkpoint from now on; rank 0 commits it with all ranks' files, and then releases
    the lock of the folder."""
    global _pending
    _pending = _Pending(files, place, commit, lock)
    _pending.start()


def finish() -> None:
    """Wait for what was begun. All ranks call it together. Raises its error, of another rank's that rank's."""
    global _pending
    running, _pending = _pending, None
    if running is not None:
        try:
            agree.everywhere(lambda: _end_of(running))
        except CheckpointError:
            if running.rank == 0:
                with running.lock.if_free() as is_free:
                    if is_free:
                        running.place.remove_unfinished()  # which nobody writes into any more
            raise


def _end_of(running: _Pending) -> None:
    running.join()
    if running.error is not None:
        raise running.error


def _done(folder: Path, rank: int) -> Path:
    return folder / f".digests-{rank:05d}"


def _failed(folder: Path, rank: int) -> Path:
    return folder / f".failed-{rank:05d}"
