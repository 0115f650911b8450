"""`autopar explain`: why the planner chose a layout or a strategy, and what every alternative would cost."""

from __future__ import annotations

import argparse

from . import common

EXAMPLE = "autopar explain '*.c_fc.weight' --model gpt2 --mesh dp=2,tp=2 --batch 8 --seq 128"


def add(subparsers) -> None:
    parser = common.command(subparsers, "explain", "say what a choice beat, and by how much", EXAMPLE, run)
    parser.add_argument("pattern", metavar="PATTERN", help="glob of names of parameters, ops (as in autopar graph) or modules")
    common.add_search(parser)
    parser.add_argument("--alternatives", type=common.count, default=6, metavar="N", help="how many to try a choice (default 6)")


def run(args: argparse.Namespace) -> int:
    common.check(args)
    from ..planner.explain import explain_plan

    with common.progress() as report:
        planned = common.search(args, report)
        explanation = explain_plan(planned, args.pattern, args.alternatives, report=report)
    print(explanation, end="")
    return 0
