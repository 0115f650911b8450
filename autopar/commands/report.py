"""`autopar report`: a plan as one HTML page to open in a browser or send to somebody."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import common

EXAMPLE = "autopar report --model gpt2 --mesh dp=2,tp=2 --batch 8 --seq 128 --out report.html"


def add(subparsers) -> None:
    parser = common.command(subparsers, "report", "write a plan as one HTML page", EXAMPLE, run)
    common.add_played(parser, baselines=True)


def run(args: argparse.Namespace) -> int:
    planned, timeline = common.played(args)
    from ..units import size
    from ..view.report import report_page

    page = report_page(planned, timeline)
    Path(args.out).write_text(page, encoding="utf-8")
    print(f"{args.out}: {size(len(page.encode()))}")
    return 0
