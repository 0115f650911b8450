"""`autopar verify`: one training step of all ranks, simulated in this process and compared with eager torch."""

from __future__ import annotations

import argparse

from .. import models
from ..errors import MeshError
from . import common

EXAMPLE = "autopar verify --model gpt2-tiny --mesh dp=2,tp=2"


def add(subparsers) -> None:
    """Declare `autopar verify` and its arguments."""
    parser = common.command(subparsers, "verify", "compare a simulated step with the unsharded model", EXAMPLE, run)
    common.add_model(parser)
    common.add_planning(parser, hardware="cpu-gloo")
    common.add_micro_batches(parser)
    common.add_pipeline(parser)
    on_gpu = "where all ranks run, one after the other: a GPU has other kernels (default cpu)"
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=on_gpu)
    parser.add_argument("--seed", type=int, default=0, help="of weights and inputs (default 0)")


def run(args: argparse.Namespace) -> int:
    """Verify a simulated step and print the report; the exit code says whether it matches."""
    common.check(args)
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        raise MeshError("--device cuda needs a GPU here, and there is none", fix="leave it out")
    from ..simulate.compare import verify

    common.quiet()
    with common.progress() as report:
        model, inputs = models.build(args.model, batch=args.batch, seq=args.seq, device="cpu", seed=args.seed)
        result = verify(
            model,
            args.mesh,
            inputs,
            report=report,
            device=args.device,
            micro_batches=args.micro_batches,
            schedule=args.schedule or "auto",
            stages_per_rank=args.stages_per_rank,
            sequence_chunks=args.sequence_chunks,
            **common.planning(args),
        )
    common.show(result)
    return 0 if result.match else 1
