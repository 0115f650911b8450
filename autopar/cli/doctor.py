"""`autopar doctor`: who did what when a run failed, from the records that its ranks left."""

from __future__ import annotations

import argparse

from . import common

EXAMPLE = "autopar doctor records/"


def add(subparsers) -> None:
    """Declare `autopar doctor` and its arguments."""
    parser = common.command(subparsers, "doctor", "say who did what when a run failed", EXAMPLE, run)
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="records of ranks, one each, or folders of them (AUTOPAR_RECORDS)"
    )


def run(args: argparse.Namespace) -> int:
    """Print what the records say, of each run."""
    from ..processes import diagnosis, records

    found = [records.Record.read(file) for file in records.files_of(args.files)]
    common.show("\n\n".join("\n".join(diagnosis.sentences(of_run)) for of_run in diagnosis.runs(found)))
    return 0
