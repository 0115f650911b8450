"""Ways in which a save is cut short and files go bad, for tests and benchmarks."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

CALLS = (
    "write",
    "fsync",
    "rename",
    "replace",
    "mkdir",
    "unlink",
    "open",
)  # of the module os: all that changes the disk


class Killed(BaseException):
    """Stands for the end of the process, where a test goes on."""


def kill_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def end_test() -> None:
    raise Killed


@contextlib.contextmanager
def counted(
    at: int | None = None, fraction: float = 0.0, stop: Callable[[], None] = kill_process
) -> Iterator[list[str]]:
    """Inside, the calls that change the disk are listed; `stop`, which raises, runs in place of number `at` and all
    later ones, in that one, if it writes, after a `fraction` of the data."""
    made: list[str] = []

    def wrapped(name: str, call: Callable) -> Callable:
        def run(*args, **kwargs):
            if name == "open" and not args[1] & os.O_CREAT:  # to read
                return call(*args, **kwargs)
            made.append(name)
            if at is not None and len(made) > at:
                if name == "write" and len(made) == at + 1:
                    call(args[0], args[1][: int(fraction * len(args[1]))])
                stop()
            return call(*args, **kwargs)

        return run

    with contextlib.ExitStack() as stack:
        for name in CALLS:
            stack.enter_context(mock.patch.object(os, name, wrapped(name, getattr(os, name))))
        yield made


def corruption(folder: Path, rng: random.Random) -> tuple[str, Callable[[], None]]:
    """Damage one or two files of a checkpoint. Returns what was done and a function that undoes it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    kind = rng.choice(("flip", "cut", "swap", "replace", "grow", "remove"))
    path = rng.choice(files)
    other = rng.choice([p for p in files if p.read_bytes() != path.read_bytes()])
    before = {p: p.read_bytes() for p in (path, other)}
    data = bytearray(before[path])
    if kind == "flip":
        bit = rng.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
    elif kind == "cut":
        path.write_bytes(data[: rng.randrange(len(data))])
    elif kind == "grow":
        path.write_bytes(data + bytes(rng.randrange(1, 9)))
    elif kind == "replace":
        path.write_bytes(rng.randbytes(len(data)))
    elif kind == "remove" and path.name != "COMMIT":  # without COMMIT it is an unfinished save, not a damaged one
        path.unlink()
    else:
        kind = "swap"
        path.write_bytes(before[other])
        other.write_bytes(before[path])

    def undo() -> None:
        for p, content in before.items():
            p.write_bytes(content)

    return f"{kind} {path.relative_to(folder)}", undo


def copy_of(folder: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    return Path(shutil.copytree(folder, to))
