"""What makes a folder a checkpoint: a manifest with length and sha256 of every file, and a COMMIT with the sha256 of the manifest.

COMMIT is written last. A folder without it is what a save that did not end has left behind; one with it is complete, and then any
difference between the files and the manifest is damage.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointCorrupt, CheckpointError
from .durable import Digest, digest_of, write_file
from .plain import canonical

MANIFEST, COMMIT, VERSION = "manifest.json", "COMMIT", 1
REPLACED = ".replaced"  # ends the name of a checkpoint that gave way to a newer one of the same step


@dataclass(frozen=True)
class Manifest:
    """`files`: path inside the folder -> Digest."""

    step: int
    files: Mapping[str, Digest]

    def write(self, folder: Path) -> str:
        """Write manifest.json and return what COMMIT has to say."""
        files = {path: [digest.bytes_, digest.sha256] for path, digest in self.files.items()}
        digest = write_file(folder / MANIFEST, canonical({"version": VERSION, "step": self.step, "files": files}))
        return digest.sha256

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Raises CheckpointError for a folder without COMMIT, and CheckpointCorrupt if the manifest is not the one committed."""
        try:
            committed = (folder / COMMIT).read_bytes()
        except OSError as error:
            raise CheckpointError(f"{folder} is not a complete checkpoint", fix="load the newest complete one") from error
        try:
            text = (folder / MANIFEST).read_bytes()
        except OSError as error:
            raise corrupt(folder, MANIFEST, "is missing") from error
        if committed != hashlib.sha256(text).hexdigest().encode():
            raise corrupt(folder, f"{MANIFEST} or {COMMIT}", "was changed")
        saved = json.loads(text)
        if saved["version"] != VERSION:
            raise CheckpointError(f"{folder} has version {saved['version']} and this is version {VERSION}", fix="update autopar")
        return Manifest(saved["step"], {path: Digest(*digest) for path, digest in saved["files"].items()})

    def check(self, folder: Path, wanted: Callable[[int], bool] = lambda i: True) -> None:
        """Read the files whose numbers are wanted. Raises CheckpointCorrupt at the first that is not what was written."""
        for i, (path, digest) in enumerate(sorted(self.files.items())):
            if not wanted(i):
                continue
            try:
                size = (folder / path).stat().st_size
                if size != digest.bytes_:
                    raise corrupt(folder, path, f"has {size} bytes, not {digest.bytes_}")
                found = digest_of(folder / path)
            except OSError as error:
                raise corrupt(folder, path, "is missing") from error
            if found != digest:
                raise corrupt(folder, path, "was changed")


def corrupt(folder: Path, path: str, what: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(f"{path} of {folder} {what}", fix="load an older checkpoint, or restore the file from a copy")


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def complete(root: Path) -> list[Path]:
    """The complete checkpoints under `root`, newest first."""
    return [path for path in _checkpoints(root) if (path / COMMIT).is_file()]


def incomplete(root: Path) -> list[Path]:
    """Folders of checkpoints that were never committed."""
    return [path for path in _checkpoints(root) if not (path / COMMIT).exists()]


def _checkpoints(root: Path) -> list[Path]:
    """Newest first; one that was replaced comes after the one that replaced it."""
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        if match := re.fullmatch(rf"step-(\d{{8,}})({re.escape(REPLACED)})?", path.name):
            found.append((int(match.group(1)), match.group(2) is None, path))
    return [path for *_, path in sorted(found, reverse=True)]
