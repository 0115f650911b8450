"""`autopar plan`: what the compiler would do with a model, without devices, weights or process groups."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from . import common

EXAMPLE = "autopar plan --model gpt2 --mesh dp=2,tp=2 --batch 8 --seq 128 --hardware h100"


def add(subparsers) -> None:
    """Declare `autopar plan` and its arguments."""
    parser = common.command(subparsers, "plan", "plan a model for a mesh, offline", EXAMPLE, run)
    common.add_search(parser, baselines=True)
    common.add_pipeline(parser)
    solver = "dual: the search; ilp: the full integer program, for small models without stages (default dual)"
    parser.add_argument("--solver", choices=("dual", "ilp"), default="dual", help=solver)
    speed = "the batch is free: --batch times powers of two, the most tokens a second of what fits"
    parser.add_argument("--tokens-per-second", action="store_true", help=speed)
    parser.add_argument("--json", metavar="FILE", help="write the plan as JSON; - for stdout instead of the text")
    parser.add_argument("--emit", metavar="FILE", help="write the code that rank 0 would run")


def run(args: argparse.Namespace) -> int:
    """Plan the model, print the plan as text or JSON, and write the files that are asked for."""
    common.check(args)
    with common.progress() as report:
        planned = common.search(args, report, solver=args.solver, tokens_per_second=args.tokens_per_second)
    plan = planned.plan
    if args.json == "-":
        print(json.dumps(plan.to_json(), indent=1, sort_keys=True, allow_nan=False))
    else:
        common.show(plan)
        if args.json:
            plan.save(args.json)
    if args.emit:
        Path(args.emit).write_text(rank_code(planned.captured, plan))
    if sys.stderr.isatty():
        print(f"planned in {plan.planning_seconds:.1f} s", file=sys.stderr)
    return 0


def rank_code(captured, plan, rank: int = 0) -> str:
    """Return the forward and backward of one rank as Python, stage by stage."""
    from ..codegen import pass_manager
    from ..codegen.rank_program import RankProgram
    from ..compiler import lower_plan

    program = lower_plan(captured, plan, rank)
    if isinstance(program, RankProgram):
        return pass_manager.text_of(program.parts)
    return "\n".join(f"# stage {i}\n\n{pass_manager.text_of(p.whole.parts)}" for i, p in program.stages.items())
