"""`autopar doctor`: who did what when a run failed, from the records that its ranks left, and from logs that hold the
last words of those that a library aborted."""

from __future__ import annotations

import argparse

from ..errors import InputError
from . import common

EXAMPLE = "autopar doctor records/"


def add(subparsers) -> None:
    """Declare `autopar doctor` and its arguments."""
    parser = common.command(subparsers, "doctor", "say who did what when a run failed", EXAMPLE, run)
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="records of ranks, one each (AUTOPAR_RECORDS), logs of what processes printed, or folders of both",
    )


def run(args: argparse.Namespace) -> int:
    """Print what the records and logs say, of each run. Raises InputError if they say nothing."""
    from ..processes import diagnosis, last_words, records

    files = records.files_of(args.files)
    found = [records.Record.read(file) for file in files if records.is_record(file)]
    words = [said for file in files if not records.is_record(file) for said in last_words.read(file)]
    if not found and not words:
        raise InputError(
            f"no process says in {', '.join(args.files)} that a library aborted it, and there is no record",
            fix="give what the processes printed to stderr, or the folder AUTOPAR_RECORDS of the run",
        )
    common.show("\n\n".join("\n".join(of_run) for of_run in diagnosis.of_all(found, words)))
    return 0
