"""`autopar report`: a plan as one HTML page to open in a browser or send to somebody."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import common

EXAMPLE = "autopar report --model gpt2 --mesh dp=2,tp=2 --batch 8 --seq 128 --out report.html"


def add(subparsers) -> None:
    parser = common.command(subparsers, "report", "write a plan as one HTML page", EXAMPLE, run)
    common.add_search(parser, baselines=True)
    common.add_slowdown(parser)
    parser.add_argument("--out", required=True, metavar="FILE", help="where to write it")


def run(args: argparse.Namespace) -> int:
    common.check(args)
    with common.progress() as report:
        planned = common.search(args, report)
    from ..planner.timeline import simulate
    from ..view.report import report_page
    from ..view.units import size

    page = report_page(planned, simulate(*planned.whole, args.slowdown))
    Path(args.out).write_text(page, encoding="utf-8")
    print(f"{args.out}: {size(len(page.encode()))}")
    return 0
