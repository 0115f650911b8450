"""The folder that the checkpoints of a run, or of several, lie in: whether all ranks see it, whether it has room for
one more, what is put there and what is cleaned away."""

from __future__ import annotations

import math
import os
import shutil
import time
import uuid
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch.distributed as dist

from ..errors import CheckpointCorrupt, CheckpointError
from ..processes import agree
from ..processes.causes import named
from ..utils.format import size
from .durable import Digest, disk_errors, sync_folder, write_file
from .manifest import COMMIT, REPLACED, Manifest, complete, folder_name, incomplete, is_checkpoint, number_of
from .model_folder import make_folder

SEEN_SECONDS = 5.0  # that a network's file system may take to show what another machine has written
SPARE_BYTES = 1 << 20  # for what is no tensor
_seen_by_all: set[Path] = set()


def check_shared(root: Path) -> None:
    """Raise CheckpointError, on all ranks, if the folder cannot be made or is not the same one on all. They call it
    together; the second time it does nothing."""
    if root in _seen_by_all:
        return

    def write() -> str:
        with disk_errors(root):
            root.mkdir(parents=True, exist_ok=True)
            (word := root / f".seen-{uuid.uuid4().hex}").touch()
            return word.name

    word = agree.from_rank_zero(write)
    lacking = [rank for rank, sees in enumerate(agree.from_all(lambda: _sees(root / word))) if not sees]
    if dist.get_rank() == 0:
        (root / word).unlink(missing_ok=True)
    if lacking:
        raise CheckpointError(
            f"{root} of {named(lacking)} is another folder than that of rank 0", fix="give one that all machines share"
        )
    _seen_by_all.add(root)


def _sees(path: Path) -> bool:
    end = time.monotonic() + SEEN_SECONDS
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@dataclass(frozen=True)
class Place:
    """Holds where the checkpoint of a step goes under a root."""

    root: Path
    step: int

    @property
    def final(self) -> Path:
        """Return the folder of the finished checkpoint."""
        return self.root / folder_name(self.step)

    @property
    def unfinished(self) -> Path:
        """Return the folder in which it is written."""
        return self.root / f".{folder_name(self.step)}.unfinished"

    def begin(self, bytes_: int, *folders: str) -> None:
        """Make the folder to write into. Raises CheckpointError where there is no room for so many bytes."""
        with disk_errors(self.root):
            self.remove_unfinished()
            disk = shutil.disk_usage(self.root)
        if disk.total and disk.free < bytes_ + SPARE_BYTES:
            raise CheckpointError(
                f"a checkpoint takes {size(bytes_ + SPARE_BYTES)}, and {self.root} has {size(disk.free)} left",
                fix="remove what is not needed there, or keep fewer (keep=1 needs room for two)",
            )
        make_folder(self.unfinished)
        for folder in folders:
            make_folder(self.unfinished / folder)

    def commit(self, files: Mapping[str, Digest], run: str, keep: int | None) -> None:
        """Give what was written its name, and clean away what it replaces."""
        with disk_errors(self.final):
            number = 1 + max((int(n) for n in map(number_of, complete(self.root)) if n < math.inf), default=0)
            now = datetime.now(UTC).isoformat(" ", "seconds")
            committed = Manifest(self.step, files, run, number, now).write(self.unfinished)
            self._put_in_place([Path(name).parent for name in files])
            write_file(self.final / COMMIT, committed.encode())
            self._clean(run, keep)

    def _put_in_place(self, folders: list[Path]) -> None:
        """Give the finished folder its name; a checkpoint that has it keeps another one, complete, until it is cleaned
        away."""
        if (self.final / COMMIT).is_file():
            shutil.rmtree(replaced := self.final.with_name(self.final.name + REPLACED), ignore_errors=True)
            os.rename(self.final, replaced)
        else:
            shutil.rmtree(self.final, ignore_errors=True)
        for folder in sorted({self.unfinished / folder for folder in folders} | {self.unfinished}, reverse=True):
            sync_folder(folder)
        os.rename(self.unfinished, self.final)
        sync_folder(self.root)

    def _clean(self, run: str, keep: int | None) -> None:
        """Remove what saves that did not end have left, what was replaced, and all of this run but the last `keep` that
        were saved, of which this is one."""
        self.remove_unfinished()
        newest = complete(self.root)
        old = [path for path in newest if path.name.endswith(REPLACED)]
        if keep is not None:
            mine = [path for path in newest if path != self.final and path not in old and _is_of(path, run)]
            old += mine[keep - 1 :]
        for path in old:
            (path / COMMIT).unlink()  # first of all: what is half removed is not complete
            sync_folder(path)
            shutil.rmtree(path, ignore_errors=True)

    def remove_unfinished(self) -> None:
        """Remove what saves into the root did not end."""
        for path in (*self.root.glob(".step-*.unfinished"), *incomplete(self.root)):
            shutil.rmtree(path, ignore_errors=True)


def _is_of(path: Path, run: str) -> bool:
    """Return whether a run saved this checkpoint; one that cannot be read is nobody's."""
    try:
        return Manifest.read(path).run == run
    except CheckpointError:
        return False


def newest_whole(folder: Path) -> tuple[Path, Manifest]:
    """Return the checkpoint `folder`, or of those under it the one that was saved last and is whole: of damaged ones
    that it comes after rank 0 warns. Every file is read, by one rank or another. All ranks call this together. Raises
    CheckpointError if there is none, CheckpointCorrupt if it is damaged and no older one is whole."""
    found, rank, ranks = agree.from_rank_zero(lambda: _candidates(folder)), dist.get_rank(), dist.get_world_size()
    for path in found:
        try:
            agree.from_rank_zero(partial(_refuse_unlisted, path))
            return path, agree.everywhere(partial(_checked, path, lambda i: i % ranks == rank))
        except CheckpointCorrupt as error:
            if path == found[-1]:
                raise
            if rank == 0:
                warnings.warn(f"{error.message}: the checkpoint before it is loaded", stacklevel=4)
    raise CheckpointError(f"there is no complete checkpoint in {folder}", fix="see the path; save_checkpoint makes one")


def _refuse_unlisted(path: Path) -> None:
    Manifest.read(path).refuse_unlisted(path)


def _checked(path: Path, wanted: Callable[[int], bool]) -> Manifest:
    """Return the manifest of a checkpoint, of which the files are whole whose numbers are wanted."""
    manifest = Manifest.read(path)
    manifest.check(path, wanted)
    return manifest


def _candidates(folder: Path) -> list[Path]:
    return [folder] if is_checkpoint(folder) or (folder / COMMIT).exists() else complete(folder)
