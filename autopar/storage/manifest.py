"""Write and check what makes a folder a checkpoint: a manifest with length and sha256 of every file, and a COMMIT with
the sha256 of the manifest.

COMMIT is written last. A folder without it is what a save that did not end has left behind; one with it is complete,
and then any difference between the files and the manifest is damage, as is a file that it does not list. The manifest
also says which run saved the checkpoint and how many saves into the same root came before, so that the newest is the
one that was saved last, whatever its step.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from ..errors import CheckpointCorrupt, CheckpointError
from .durable import Digest, digest_of, write_file
from .plain import canonical

MANIFEST, COMMIT, VERSION = "manifest.json", "COMMIT", 1
REPLACED = ".replaced"  # ends the name of a checkpoint that gave way to a newer one of the same step
_NAME = re.compile(rf"step-(\d{{8,}})({re.escape(REPLACED)})?", re.ASCII)


@dataclass(frozen=True)
class Manifest:
    """`files`: path inside the folder -> Digest. `run`: the name of the training that saved it, the same after it went
    on from a checkpoint of its own. `number`: of the save, counted over all that went into the root. `saved`: when, as
    text."""

    step: int
    files: Mapping[str, Digest]
    run: str = ""
    number: int = 0
    saved: str = ""

    def write(self, folder: Path) -> str:
        """Write manifest.json and return what COMMIT has to say."""
        files = {path: [digest.bytes_, digest.sha256] for path, digest in self.files.items()}
        data = {
            "version": VERSION,
            "step": self.step,
            "files": files,
            "run": self.run,
            "number": self.number,
            "saved": self.saved,
        }
        return write_file(folder / MANIFEST, canonical(data)).sha256

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Read the manifest of a checkpoint. Raises CheckpointError for a folder without COMMIT, and CheckpointCorrupt
        if the manifest is not the one committed, or no manifest."""
        try:
            committed = (folder / COMMIT).read_bytes()
        except OSError as error:
            raise CheckpointError(
                f"{folder} is not a complete checkpoint", fix="load the newest complete one"
            ) from error
        try:
            text = (folder / MANIFEST).read_bytes()
        except OSError as error:
            raise corrupt(folder, MANIFEST, "is missing") from error
        if committed != hashlib.sha256(text).hexdigest().encode():
            raise corrupt(folder, f"{MANIFEST} or {COMMIT}", "was changed")
        try:
            return Manifest._of(json.loads(text), folder)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise corrupt(folder, MANIFEST, f"is no manifest: {error!r:.200}") from error

    @staticmethod
    def _of(saved: dict, folder: Path) -> Manifest:
        if saved["version"] != VERSION:
            raise CheckpointError(
                f"{folder} has version {saved['version']} and this is version {VERSION}", fix="update autopar"
            )
        files = {path: Digest(bytes_, sha256) for path, (bytes_, sha256) in saved["files"].items()}
        for path, digest in files.items():
            if PurePath(path).is_absolute() or ".." in PurePath(path).parts or type(digest.bytes_) is not int:
                raise ValueError(f"{path} lies outside of the folder, or has no length")
        manifest = Manifest(saved["step"], files, saved.get("run", ""), saved.get("number", 0), saved.get("saved", ""))
        if [type(value) for value in (manifest.step, manifest.run, manifest.number, manifest.saved)] != [
            int,
            str,
            int,
            str,
        ]:
            raise ValueError("its step, run or number is of another kind")
        return manifest

    def check(self, folder: Path, wanted: Callable[[int], bool] = lambda i: True) -> None:
        """Read the files whose numbers are wanted. Raises CheckpointCorrupt at the first that is not what was
        written."""
        for i, (path, digest) in enumerate(sorted(self.files.items())):
            if not wanted(i):
                continue
            try:
                status = (folder / path).stat()
                if not stat.S_ISREG(status.st_mode):
                    raise corrupt(folder, path, "is not a file")
                if status.st_size != digest.bytes_:
                    raise corrupt(folder, path, f"has {status.st_size} bytes, not {digest.bytes_}")
                found = digest_of(folder / path)
            except FileNotFoundError as error:
                raise corrupt(folder, path, "is missing") from error
            except OSError as error:
                raise corrupt(folder, path, f"cannot be read: {error.strerror}") from error
            if found != digest:
                raise corrupt(folder, path, "was changed")

    def refuse_unlisted(self, folder: Path) -> None:
        """Raise CheckpointCorrupt if the folder has a file that the save did not write and a reader might take for one
        of its own. Hidden files are never read, and may be there."""
        known = {MANIFEST, COMMIT, *self.files}
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if not path.is_dir() and not path.name.startswith(".") and name not in known:
                raise CheckpointCorrupt(
                    f"{name} of {folder} was not written by the save", fix="move it out of the checkpoint"
                )


def corrupt(folder: Path, path: str, what: str) -> CheckpointCorrupt:
    """Return the error for a damaged file of a checkpoint; `what` says the damage."""
    return CheckpointCorrupt(
        f"{path} of {folder} {what}", fix="load an older checkpoint, or restore the file from a copy"
    )


def folder_name(step: int) -> str:
    """Return the name of the checkpoint of a step, with at least eight digits."""
    return f"step-{step:08d}"


def complete(root: Path) -> list[Path]:
    """Return the complete checkpoints under `root`, the one that was saved last first. One whose manifest cannot be
    read comes before all others, so that loading it says so."""
    paths = [path for path in _checkpoints(root) if (path / COMMIT).is_file()]
    return sorted(paths, key=lambda path: -number_of(path))  # else they stay in the order of their steps


def number_of(path: Path) -> float:
    """Return the number of the save that wrote a complete checkpoint; infinite if its manifest cannot be read."""
    try:
        return Manifest.read(path).number
    except CheckpointError:
        return math.inf


def incomplete(root: Path) -> list[Path]:
    """Return the folders of checkpoints that were never committed."""
    return [path for path in _checkpoints(root) if not (path / COMMIT).exists()]


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is named as `save_checkpoint` names them."""
    return _NAME.fullmatch(path.name) is not None


def _checkpoints(root: Path) -> list[Path]:
    """Return the folders of checkpoints, largest step first; one that was replaced comes after the one that replaced
    it."""
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        if match := _NAME.fullmatch(path.name):
            found.append((int(match.group(1)), match.group(2) is None, path))
    return [path for *_, path in sorted(found, reverse=True)]
