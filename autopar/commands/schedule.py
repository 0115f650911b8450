"""`autopar schedule`: a pipeline schedule, or that of a saved plan, as text, as a picture or as a trace."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..errors import PipelineError
from . import common

EXAMPLE = "autopar schedule zbv --ranks 4 --micro-batches 8 --out zbv.svg"
FORMS = (".svg", ".html", ".json")
PAGE = '<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{}</title>\n{}\n'


def add(subparsers) -> None:
    parser = common.command(subparsers, "schedule", "show the order in which pipeline stages run", EXAMPLE, run)
    parser.add_argument("schedule", metavar="NAME", help="1f1b, interleaved_1f1b, zb_h1, zbv, ...; or a saved plan")
    parser.add_argument("--ranks", type=int, default=4, help="along the pipeline's axis (default 4)")
    parser.add_argument("--micro-batches", type=int, default=8, help="default 8")
    parser.add_argument("--stages-per-rank", type=int, help="of interleaved schedules (default 2)")
    parser.add_argument("--out", help="write a picture (.svg, .html) or a Chrome trace (.json)")


def run(args: argparse.Namespace) -> int:
    from ..schedule.catalogue import make
    from ..schedule.play import play
    from ..schedule.text import grid, summary

    if args.out and Path(args.out).suffix not in FORMS:
        raise PipelineError(f"{args.out} is neither a picture nor a trace", fix=f"end its name in {', '.join(FORMS)}")
    if args.schedule.endswith(".json"):
        played, title = _of_plan(args.schedule)
    else:
        played = play(make(args.schedule, args.ranks, args.micro_batches, args.stages_per_rank))
        title = f"{played.schedule.name}, F, I and W of equal length"
    print(summary(played), grid(played), sep="\n")
    if args.out:
        write(played, Path(args.out), title)
        print(f"written to {args.out}")
    return 0


def _of_plan(path: str):
    from ..plan import Plan

    plan = Plan.load(path)
    if plan.pipeline is None:
        raise PipelineError(f"the plan {path} has no pipeline", fix="plan for a mesh with an axis pp, such as pp=4,dp=2")
    return plan.pipeline.played(), f"{plan.model} on mesh {plan.mesh}, predicted"


def write(played, path: Path, title: str) -> None:
    """A picture or a trace, by the ending of the name."""
    from ..schedule.svg import svg
    from ..schedule.trace import trace_of

    if path.suffix == ".json":
        path.write_text(json.dumps(trace_of(played)))
    else:
        picture = svg(played, title)
        path.write_text(PAGE.format(title, picture) if path.suffix == ".html" else picture)
