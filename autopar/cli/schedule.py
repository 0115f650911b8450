"""`autopar schedule`: a pipeline schedule, or that of a saved plan, as text, as a picture or as a trace."""

from __future__ import annotations

import argparse

from ..errors import PipelineError
from ..plans.plan import Plan
from ..schedule import files
from ..schedule.catalogue import make
from ..schedule.play import play
from ..schedule.text import text
from . import common

EXAMPLE = "autopar schedule zbv --ranks 4 --micro-batches 8 --out zbv.svg"


def add(subparsers) -> None:
    """Declare `autopar schedule` and its arguments."""
    parser = common.command(subparsers, "schedule", "show the order in which pipeline stages run", EXAMPLE, run)
    parser.add_argument("schedule", metavar="NAME", help="1f1b, interleaved_1f1b, zb_h1, zbv, ...; or a saved plan")
    parser.add_argument("--ranks", type=int, default=4, help="along the pipeline's axis (default 4)")
    parser.add_argument("--micro-batches", type=int, default=8, help="default 8")
    parser.add_argument("--stages-per-rank", type=int, help="of interleaved schedules (default 2)")
    parser.add_argument("--out", help="write a picture (.svg, .html), a Chrome trace (.json) or the text (.txt)")


def run(args: argparse.Namespace) -> int:
    """Print the schedule, or that of the saved plan, and write it to --out if that is given."""
    if args.out:
        files.check_name(args.out)
    if args.schedule.endswith(".json"):
        played, title = _of_plan(args.schedule)
    else:
        played = play(make(args.schedule, args.ranks, args.micro_batches, args.stages_per_rank))
        title = f"{played.schedule.name}, F, I and W of equal length"
    common.show(text(played))
    if args.out:
        files.save(args.out, played, title)
        print(f"written to {args.out}")
    return 0


def _of_plan(path: str):
    plan = Plan.load(path)
    if not plan.pipeline.costs:
        raise PipelineError(
            f"the plan {path} has no pipeline", fix="plan for a mesh with an axis pp, such as pp=4,dp=2"
        )
    return plan.pipeline.played(), f"{plan.model} on mesh {plan.mesh}, predicted"
