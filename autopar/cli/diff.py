"""`autopar diff`: what one saved plan decides otherwise than another. Exit code 0 if nothing, 1 if something, as of
diff."""

from __future__ import annotations

import argparse

from ..plans.diff import diff_text
from ..plans.plan import Plan
from . import common

EXAMPLE = "autopar diff before.json after.json"


def add(subparsers) -> None:
    """Declare `autopar diff` and its arguments."""
    parser = common.command(subparsers, "diff", "print what differs between two saved plans", EXAMPLE, run)
    for name in ("before", "after"):
        parser.add_argument(name, metavar=name.upper(), help="a file written by autopar plan --json")


def run(args: argparse.Namespace) -> int:
    """Print what differs between two saved plans; the exit code says whether anything does."""
    text = diff_text(Plan.load(args.before), Plan.load(args.after))
    common.show(text)
    return 1 if text else 0
