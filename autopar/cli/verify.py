"""`autopar verify`: one training step of all ranks, simulated in this process and compared with eager torch."""

from __future__ import annotations

import argparse

from .. import models
from . import common

EXAMPLE = "autopar verify --model gpt2-tiny --mesh dp=2,tp=2"


def add(subparsers) -> None:
    """Declare `autopar verify` and its arguments."""
    parser = common.command(subparsers, "verify", "compare a simulated step with the unsharded model", EXAMPLE, run)
    common.add_model(parser)
    common.add_planning(parser, hardware="cpu-gloo")
    parser.add_argument("--seed", type=int, default=0, help="of weights and inputs (default 0)")


def run(args: argparse.Namespace) -> int:
    """Verify a simulated step and print the report; the exit code says whether it matches."""
    common.check(args)
    from ..simulate.compare import verify_model

    common.quiet()
    with common.progress() as report:
        model, inputs = models.build(args.model, batch=args.batch, seq=args.seq, device="cpu", seed=args.seed)
        result = verify_model(model, inputs, args.mesh, report=report, **common.planning(args))
    print(result, end="")
    return 0 if result.match else 1
