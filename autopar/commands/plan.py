"""`autopar plan`: what the compiler would do with a model, without devices, weights or process groups."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from . import common

EXAMPLE = "autopar plan --model gpt2 --mesh dp=2,tp=2 --batch 8 --seq 128 --hardware h100"


def add(subparsers) -> None:
    parser = common.command(subparsers, "plan", "plan a model for a mesh, offline", EXAMPLE, run)
    common.add_model(parser, batch=None, seq=None)
    common.add_planning(parser, hardware="h100")
    common.add_adapting(parser)
    parser.add_argument("--optimizer", default="adamw", help="whose state to make room for (default adamw)")
    parser.add_argument("--no-baselines", action="store_true", help="leave the expert strategies out: faster")
    parser.add_argument("--strict", action="store_true", help="refuse ops without a sharding rule")
    parser.add_argument("--json", metavar="FILE", help="write the plan as JSON; - for stdout instead of the text")
    parser.add_argument("--emit", metavar="FILE", help="write the code that rank 0 would run")


def run(args: argparse.Namespace) -> int:
    common.check(args)
    common.adaptations(args)
    with common.progress() as report:
        plan, captured = make(args, report)
    if args.json == "-":
        print(json.dumps(plan.to_json(), indent=1, sort_keys=True, allow_nan=False))
    else:
        print(plan, end="")
        if args.json:
            plan.save(args.json)
    if args.emit:
        Path(args.emit).write_text(rank_code(captured, plan))
    if sys.stderr.isatty():
        print(f"planned in {plan.planning_seconds:.1f} s", file=sys.stderr)
    return 0


def make(args: argparse.Namespace, report: common.Report):
    """(plan, the capture that it was made for) of the model on the meta device."""
    from .. import models
    from ..simulated import plan_and_capture

    common.quiet()
    report("building the model")
    model, inputs = models.build(args.model, batch=args.batch, seq=args.seq)
    return plan_and_capture(
        model, args.mesh, inputs, optimizer=args.optimizer, strict=args.strict,
        baselines=not args.no_baselines, report=report, adapt=common.adaptations(args), **common.planning(args),
    )  # fmt: skip


def rank_code(captured, plan, rank: int = 0) -> str:
    """Forward and backward of one rank as Python."""
    from .. import debug
    from ..lower import lower

    return debug.stage_text(lower(captured, plan, rank).parts)
