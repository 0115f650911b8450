"""The last words of a process that a library aborted: where its threads were, and which rank it was.

Such a process raises nothing and leaves no record: faulthandler prints its threads to stderr, which ends up in a log.
One thread of every watched process runs a function whose name says which rank of which run it is (`signed`), so that
the text says it, whatever the log is called and whoever else writes to it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import InputError

LONGEST_BYTES = 1 << 26  # of the end of a log that is read
MOST_FRAMES, MOST_THREADS, LONGEST_LINE = 100, 1000, 500
SAID_BEFORE = 20  # lines before the threads, in which a library says why
PREFIX = re.compile(r"\[\w+\d\]:")  # of torchrun
FATAL = re.compile(r"Fatal Python error: (.*)")
THREAD = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+.* \(most recent call first\):")
FRAME = re.compile(r'\s+File "(.*)", line (\d+|\?\?\?) in (.*)')
SIGNATURE = re.compile(r"rank (\d{1,7}) of (\d{1,7}) in run ([0-9a-f]{8})")
REASON = re.compile(r"what\(\):|terminate called|[Aa]ssert|enforce fail|CHECK|CUDA error|malloc|free\(\)|corrupt")
Frame = tuple[str, str]  # "file:line", the function's name


@dataclass(frozen=True)
class LastWords:
    """Holds what one process said. `rank`, `world` and `run` are None if it was not watched; `error`: what faulthandler
    calls it; `reason`: what the library said before; `current`: the frames of the thread that failed, innermost first;
    `others`: those of the other threads."""

    rank: int | None
    world: int | None
    run: str | None
    error: str
    reason: str
    current: tuple[Frame, ...]
    others: tuple[tuple[Frame, ...], ...]


def tell() -> None:
    """Let this process print where its threads are if a library aborts it, as gloo does where more bytes come than it
    waits for. Nothing changes where somebody has seen to that before."""
    if not faulthandler.is_enabled():
        with contextlib.suppress(RuntimeError, ValueError, OSError, AttributeError):  # stderr is no file in a notebook
            faulthandler.enable()


def signed(run: Callable[[], None], rank: int, world: int, name: str) -> Callable[[], None]:
    """Return a function for a thread that does the same, and says in every stack which rank of which run it is in."""

    def thread() -> None:
        run()

    thread.__code__ = thread.__code__.replace(co_name=f"rank {rank} of {world} in run {name}")
    return thread


def read(file: Path) -> list[LastWords]:
    """Return the last words in a log, of all processes that wrote to it. Raises InputError for a file that cannot be
    read."""
    try:
        with open(file, "rb") as stream:
            stream.seek(max(0, stream.seek(0, 2) - LONGEST_BYTES))
            text = stream.read(LONGEST_BYTES).decode(errors="replace")
    except OSError as error:
        raise InputError(
            f"{file} cannot be read: {error.strerror}", fix="give logs, or the files that AUTOPAR_RECORDS=FOLDER names"
        ) from None
    by_process: dict[str, list[str]] = defaultdict(list)
    for line in text.splitlines():
        prefix = match[0] if (match := PREFIX.match(line)) else ""
        by_process[prefix.strip()].append(line[len(prefix) :][:LONGEST_LINE])
    return [words for lines in by_process.values() for words in _all(lines)]


def _all(lines: Sequence[str]) -> Iterator[LastWords]:
    """Iterate over the last words among the lines of a process, or of several one after the other."""
    found = [(i, match[1]) for i, line in enumerate(lines) if (match := FATAL.match(line))]
    for (start, error), end in zip(found, [*(i for i, _ in found[1:]), len(lines)]):
        before = [line.strip() for line in lines[max(0, start - SAID_BEFORE) : start]]
        reason = next((_shown(line) for line in reversed(before) if REASON.search(line)), "")
        yield _of(_shown(error), reason, lines[start + 1 : end])


def _of(error: str, reason: str, lines: Sequence[str]) -> LastWords:
    threads: list[tuple[bool, list[Frame]]] = []
    for line in lines:
        if match := THREAD.match(line):
            if len(threads) == MOST_THREADS:
                break
            threads.append((match[1] == "Current thread", []))
        elif threads and (match := FRAME.match(line)) and len(threads[-1][1]) < MOST_FRAMES:
            threads[-1][1].append((f"{_shown(match[1])}:{match[2]}", _shown(match[3])))
    names = [name for _, frames in threads for _, name in frames]
    signature = next((match for name in names if (match := SIGNATURE.fullmatch(name))), None)
    rank, world, run = (int(signature[1]), int(signature[2]), signature[3]) if signature else (None, None, None)
    current = next((tuple(frames) for is_current, frames in threads if is_current), ())
    others = tuple(tuple(frames) for is_current, frames in threads if not is_current)
    return LastWords(rank, world, run, error, reason, current, others)


def _shown(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text).strip()
