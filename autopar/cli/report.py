"""`autopar report`: a plan as one HTML page to open in a browser or send to somebody."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..utils.format import size
from . import common

EXAMPLE = "autopar report --model gpt2 --mesh dp=2,tp=2 --batch 8 --seq 128 --out report.html"


def add(subparsers) -> None:
    """Declare `autopar report` and its arguments."""
    parser = common.command(subparsers, "report", "write a plan as one HTML page", EXAMPLE, run)
    common.add_played(parser, baselines=True)
    common.add_pipeline(parser)


def run(args: argparse.Namespace) -> int:
    """Plan the model and write the plan as an HTML page to --out."""
    planned, timeline = common.played(args)
    page = _pipeline(planned, args.no_baselines) if timeline is None else _flat(planned, timeline)
    Path(args.out).write_text(page, encoding="utf-8")
    print(f"{args.out}: {size(len(page.encode()))}")
    return 0


def _flat(planned, timeline) -> str:
    from ..view.report import report_page

    return report_page(planned, timeline)


def _pipeline(planned, alone: bool) -> str:
    from ..planner.explain_pipeline import explain_pipeline
    from ..view.pipeline_report import pipeline_page

    with common.progress() as report:
        explanation = None if alone else explain_pipeline(planned, report=report)
    return pipeline_page(planned, explanation)
