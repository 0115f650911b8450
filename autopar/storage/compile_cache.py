"""Keep on disk what a job found out when it started, for the next one that starts with the same.

An entry is a safetensors file under the hash of its key: text, and tensors. It is data alone, and what reads it checks
it against the model at hand (autopar/frontend/capture_data.py, autopar/plans/file.py, autopar/codegen/program_data.py).
Jobs may share the folder: an entry appears whole or not at all, one that is damaged counts as none, and the cache never
stops a job.

AUTOPAR_CACHE names the folder, or is "off"; without it it is autopar in the user's cache folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import uuid
from collections.abc import Sequence
from pathlib import Path

import safetensors.torch
import torch

LIMIT_BYTES = 1 << 30  # of all entries; those that were used the longest ago go
OFF = ("off", "0", "no", "none")
TEXT = "text"

_log = logging.getLogger("autopar")


class CompileCache:
    """A folder of entries, of `limit_bytes` together. Without a folder, or a key, nothing is kept."""

    def __init__(self, folder: str | Path | None, limit_bytes: int = LIMIT_BYTES):
        self.folder, self.limit_bytes = Path(folder) if folder is not None else None, limit_bytes

    @staticmethod
    def of_environment() -> CompileCache:
        """Return the user's cache."""
        asked = os.environ.get("AUTOPAR_CACHE")
        if asked is not None and asked.strip().lower() in OFF:
            return CompileCache(None)
        home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        return CompileCache(asked or os.path.join(home, "autopar"))

    def get(self, key: str | None) -> tuple[str, list[torch.Tensor]] | None:
        """Return the entry of a key, None if there is none that is whole."""
        if self.folder is None or key is None:
            return None
        path = self._path(self.folder, key)
        try:
            data = path.read_bytes()
            found = safetensors.torch.load(data)
            text = found.pop(TEXT).numpy().tobytes()
            tensors = [found[str(at)] for at in range(len(found) - 1)]
            digest = content_hash(key.encode() + b"\0" + text, tensors).encode()
            whole = found[str(len(tensors))].numpy().tobytes() == digest
            if whole:
                os.utime(path)
        except FileNotFoundError:
            return None
        except Exception as error:  # a file that is no entry
            _log.info("%s is no entry of the cache: %s", path, error)
            return None
        return (text.decode(), tensors) if whole else None

    def put(self, key: str | None, text: str, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Keep an entry under a key."""
        if self.folder is None or key is None:
            return
        path, content = self._path(self.folder, key), text.encode()
        named = {str(at): t.detach().cpu().contiguous().clone() for at, t in enumerate(tensors)}
        digest = content_hash(key.encode() + b"\0" + content, list(named.values())).encode()
        named |= {TEXT: _bytes(content), str(len(tensors)): _bytes(digest)}
        unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}.unfinished")
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            unfinished.write_bytes(safetensors.torch.save(named))
            os.replace(unfinished, path)
            self._make_room(self.folder)
        except Exception as error:  # no room, no right to write, a type that the format has not
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            _log.info("%s was not kept: %s", path, error)

    @staticmethod
    def _path(folder: Path, key: str) -> Path:
        return folder / f"{hashlib.sha256(key.encode()).hexdigest()}.safetensors"

    def _make_room(self, folder: Path) -> None:
        entries = [(f.stat(), f) for f in folder.glob("*.safetensors")]
        total = sum(stat.st_size for stat, _ in entries)
        for stat, file in sorted(entries, key=lambda entry: entry[0].st_mtime):
            if total <= self.limit_bytes:
                break
            file.unlink(missing_ok=True)
            total -= stat.st_size


def _bytes(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def content_hash(text: bytes, tensors: Sequence[torch.Tensor]) -> str:
    """Return the sha256 of text and tensors."""
    found = hashlib.sha256(text)
    for tensor in tensors:
        found.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        found.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return found.hexdigest()
