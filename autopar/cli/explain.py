"""`autopar explain`: why the planner chose a layout, a strategy or a pipeline, and what every alternative would
cost."""

from __future__ import annotations

import argparse

from ..errors import AutoparError
from ..ir.mesh import Mesh
from ..plans.pipeline import axis_of
from . import common

EXAMPLE = "autopar explain '*.c_fc.weight' --model gpt2 --mesh dp=2,tp=2 --batch 8 --seq 128"


def add(subparsers) -> None:
    """Declare `autopar explain` and its arguments."""
    parser = common.command(subparsers, "explain", "say what a choice beat, and by how much", EXAMPLE, run)
    pattern = (
        "glob of names of parameters, ops (as in autopar graph) or modules; with pp, none explains the pipeline alone"
    )
    parser.add_argument("pattern", metavar="PATTERN", nargs="?", help=pattern)
    common.add_search(parser)
    common.add_pipeline(parser)
    parser.add_argument(
        "--alternatives", type=common.count, default=6, metavar="N", help="how many to try a choice (default 6)"
    )


def run(args: argparse.Namespace) -> int:
    """Plan the model and print why the plan chose what PATTERN names."""
    common.check(args)
    if args.pattern is None and args.mesh is not None and not axis_of(Mesh.parse(args.mesh)):
        raise AutoparError("PATTERN is missing, which only stages can do without", fix="see autopar explain --help")
    from ..api import entry as api

    with common.progress() as report:
        planned = common.search(args, report)
        explanation = api.explain(planned, args.pattern, alternatives=args.alternatives, report=report)
    common.show(explanation)
    return 0
