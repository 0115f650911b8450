"""Keep what a rank knows of a failure: a file of JSON says where it was, what it called last, what others answered.

Nothing is written while all goes well. `autopar doctor` reads the files of all ranks (diagnosis.py). They lie in the
folder AUTOPAR_RECORDS, else in autopar-records in that for temporary files, where those of the last RUNS_KEPT runs that
failed stay; AUTOPAR_RECORDS=off writes none.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError
from .causes import Cause, Progress

MOST = 200  # calls, collectives or lines of a stack
LONGEST_BYTES, MOST_RANKS = 1 << 24, 1 << 20  # of a file that is read
SUFFIX = ".json"
RUNS_KEPT = 8  # in the folder for temporary files


@dataclass(frozen=True)
class Record:
    """Holds what a rank knows at a failure. `when`: in UTC; `plans`: by hash, of how many stages; `answers`: of other
    ranks, where they were; `calls`: the last ones, as (number, step, what), in which all ranks meet; `collectives`: the
    last ones of the graph that runs; `stack`: of the program, innermost line last."""

    run: str
    rank: int
    world: int
    machine: int
    host: str
    process: int
    when: str
    torch: str
    plans: dict[str, int]
    place: Progress
    cause: Cause
    answers: dict[int, dict | str]
    calls: Sequence[tuple[int, int, str]]
    collectives: Sequence[str]
    stack: Sequence[str]

    def write(self) -> Path | None:
        """Write the record, whole or not at all, and return its file, None if none is wanted. The failure has an error
        of its own to raise, so that a folder that cannot be written is none."""
        asked = os.environ.get("AUTOPAR_RECORDS") or os.path.join(tempfile.gettempdir(), "autopar-records")
        if asked == "off":
            return None
        folder = Path(asked).expanduser()
        file = folder / f"{self.run}-rank-{self.rank:05d}{SUFFIX}"
        unfinished = file.with_suffix(".unfinished")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(json.dumps(asdict(self), indent=1))
            unfinished.replace(file)
            if not os.environ.get("AUTOPAR_RECORDS"):
                _remove_old(folder)
        except OSError:
            return None
        return file

    @classmethod
    def read(cls, file: Path) -> Record:
        """Return the record in a file. Raises InputError if it is none."""
        try:
            with open(file, "rb") as stream:
                found = json.loads(stream.read(LONGEST_BYTES))
            texts: dict[str, Any] = {name: str(found[name]) for name in ("run", "host", "when", "torch")}
            numbers: dict[str, Any] = {name: int(found[name]) for name in ("rank", "world", "machine", "process")}
            if not 0 <= numbers["rank"] < numbers["world"] <= MOST_RANKS:
                raise ValueError
            call, position, step = (int(found["place"][name]) for name in ("call", "position", "step"))
            cause = Cause(**found["cause"])
            return cls(
                **texts,
                **numbers,
                answers={int(rank): answer for rank, answer in found["answers"].items()},
                plans={str(plan): int(stages) for plan, stages in found["plans"].items()},
                place=Progress(call, position, step, str(found["place"]["what"]), str(found["place"]["doing"])),
                cause=Cause(str(cause.kind), [int(rank) for rank in cause.ranks], str(cause.what)),
                calls=[(int(number), int(step), str(what)) for number, step, what in found["calls"]],
                collectives=[str(text) for text in found["collectives"]],
                stack=[str(line) for line in found["stack"]],
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            said = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else "is no record of a failure"
            raise InputError(f"{file} {said}", fix="give the files that AUTOPAR_RECORDS=FOLDER names") from None


def _remove_old(folder: Path) -> None:
    """Remove the records of all runs but the last ones."""
    runs: dict[str, list[tuple[float, Path]]] = defaultdict(list)
    for file in folder.glob(f"*-rank-*{SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):  # another rank has removed it
            runs[file.name.partition("-")[0]].append((file.stat().st_mtime, file))
    for run in sorted(runs, key=lambda run: max(runs[run]))[:-RUNS_KEPT]:
        for _, file in runs[run]:
            file.unlink(missing_ok=True)


def files_of(paths: Sequence[str]) -> list[Path]:
    """Return the files among some files and folders, of folders the records and logs (of `torchrun --log-dir` too).
    Raises InputError if there is none."""
    found = []
    for path in map(Path, paths):
        found += [*sorted(path.glob(f"*-rank-*{SUFFIX}")), *sorted(path.rglob("*.log"))] if path.is_dir() else [path]
    if not found:
        raise InputError(
            f"there is no record of a failure, and no log, in {', '.join(paths)}",
            fix="give the folder AUTOPAR_RECORDS of the run, or files from it",
        )
    return found


def is_record(file: Path) -> bool:
    """Return whether a file is to be read as a record, and not as a log."""
    try:
        with open(file, "rb") as stream:
            return file.suffix == SUFFIX or stream.read(1) == b"{"
    except OSError:
        return True  # which says what is wrong with it
