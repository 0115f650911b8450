"""`autopar compare`: plans that were saved with `autopar plan --json`, side by side."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..plans.compare import side_by_side
from ..plans.plan import Plan
from . import common

EXAMPLE = "autopar compare dp8.json tp8.json"


def add(subparsers) -> None:
    """Declare `autopar compare` and its arguments."""
    parser = common.command(subparsers, "compare", "put saved plans side by side", EXAMPLE, run)
    parser.add_argument("plans", nargs="+", metavar="PLAN", help="files written by autopar plan --json")


def run(args: argparse.Namespace) -> int:
    """Print the saved plans side by side, named after their files."""
    names = [Path(path).stem for path in args.plans]
    common.show(side_by_side(list(map(Plan.load, args.plans)), names if len({*names}) == len(names) else args.plans))
    return 0
