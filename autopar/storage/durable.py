"""Files that are on the disk when a function returns, and what they hold in short.

Everything that is saved goes through these few calls, in an order that leaves a whole old state or a whole new one,
wherever the process or the machine stops.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import CheckpointError

CHUNK_BYTES = 16 << 20


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn what the disk refuses inside into a CheckpointError that names `path`, or the file itself where that is
    known."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot write {error.filename or path}: {error.strerror}",
            fix="give a folder that can be written, on a disk with room",
        ) from error


@dataclass(frozen=True)
class Digest:
    """Length and sha256 (hex) of a file."""

    bytes_: int
    sha256: str


@dataclass
class Writer:
    """A new file that is written from its start to its end. `close` returns its Digest once all of it is on the disk. A
    file that cannot be written is closed and removed: an open one would hold its space until the process ends."""

    path: Path
    _file: int | None = field(init=False)
    _bytes: int = field(init=False, default=0)

    def __post_init__(self):
        self._hash = hashlib.sha256()
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def write(self, data) -> None:
        """Write all of a bytes-like object."""
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        with self._abandoned_on_error():
            for start in range(0, len(view), CHUNK_BYTES):
                chunk = view[start : start + CHUNK_BYTES]
                self._hash.update(chunk)
                while len(chunk):
                    chunk = chunk[os.write(self._file, chunk) :]
        self._bytes += len(view)

    def close(self) -> Digest:
        """Close the file once all of it is on the disk, and return its Digest."""
        with self._abandoned_on_error():
            os.fsync(self._file)
        file, self._file = self._file, None
        os.close(file)
        return Digest(self._bytes, self._hash.hexdigest())

    def abandon(self) -> None:
        """Close and remove a file that will not be finished; nothing if it is closed."""
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)
            with contextlib.suppress(OSError):
                os.unlink(self.path)

    @contextlib.contextmanager
    def _abandoned_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.abandon()
            raise


def write_file(path: Path, data: bytes) -> Digest:
    """Write a new file with this content and return its Digest. Who reads the file sees nothing or all of it."""
    unfinished = path.with_name(path.name + ".unfinished")
    writer = Writer(unfinished)
    writer.write(data)
    digest = writer.close()
    os.replace(unfinished, path)
    sync_folder(path.parent)
    return digest


def sync_folder(folder: Path) -> None:
    """Make sure that names that were made or changed in `folder` are on the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest_of(path: Path) -> Digest:
    """Read a file from start to end and return its Digest."""
    with open(path, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return Digest(file.tell(), sha256)
