"""`autopar estimate`: what a configuration that somebody else chose would cost, whether it fits or not."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..errors import StrategyError
from . import common

EXAMPLE = "autopar estimate --model gpt2 --mesh dp=4,tp=2 --batch 64 --seq 1024 --strategy megatron_sp --recompute full"


def add(subparsers) -> None:
    """Declare `autopar estimate` and its arguments."""
    parser = common.command(subparsers, "estimate", "cost a configuration that you choose", EXAMPLE, run)
    common.add_search(parser)
    common.add_pipeline(parser)
    zero = (
        "shard optimizer state (1), gradients (2) and parameters (3) over the data axes of a tensor-parallel strategy"
    )
    parser.add_argument("--zero", type=int, choices=(0, 1, 2, 3), default=0, help=zero)
    parser.add_argument("--json", metavar="FILE", help="write the numbers as JSON; - for stdout instead of the text")


def run(args: argparse.Namespace) -> int:
    """Print what the configuration costs, as text or as JSON."""
    if args.zero:
        args.strategy = _with_zero(args.strategy, args.zero)
    common.check(args)
    from ..api.estimate import of_search

    with common.progress() as report:
        planned = common.search(args, report, refuses=False)
    found = of_search(planned)
    text = json.dumps(found.to_json(), indent=1, sort_keys=True, allow_nan=False)
    if args.json == "-":
        print(text)
    else:
        common.show(found)
        if args.json:
            Path(args.json).write_text(text + "\n")
    return 0


def _with_zero(strategy: str | None, stage: int) -> str:
    """Add ZeRO: `--strategy megatron_sp --zero 1` -> "megatron_sp+zero1"; without a strategy, ZeRO alone."""
    if strategy in (None, "ddp"):
        return f"zero{stage}"
    if not strategy.startswith(("megatron", "tp")):
        raise StrategyError(
            f"{strategy} says already where optimizer state lies", fix="leave --zero out, or use megatron_sp"
        )
    return f"{strategy}+zero{stage}"
