"""`autopar train`: a training run on processes of its own, or on those of torchrun, with what was predicted beside what
was measured. GPUs are used where there is one for each process, processors elsewhere."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .. import models
from ..errors import AdaptError, CheckpointError, InputError, MeshError, PipelineError
from ..ir.mesh import Mesh
from ..plans.pipeline import axis_of
from ..schedule import files
from . import common, elastic
from .stop_signals import end_with_parent

if TYPE_CHECKING:
    from torch import nn

EXAMPLE = "autopar train --model gpt2-tiny --mesh dp=2,tp=2 --steps 20"


def add(subparsers) -> None:
    """Declare `autopar train` and its arguments."""
    parser = common.command(subparsers, "train", "train a model on processes of this machine", EXAMPLE, run)
    common.add_model(parser)
    common.add_planning(parser, hardware=None)
    common.add_adapting(parser)
    common.add_pipeline(parser)
    trace = (
        "how a pipeline's last step ran beside the prediction: picture (.svg, .html), Chrome trace (.json), text (.txt)"
    )
    common.add_micro_batches(parser)
    parser.add_argument("--trace", metavar="FILE", help=trace)
    data = (
        "text, or JSONL with a field text, to train on, by the tokenizer of a folder, else by bytes (default a corpus)"
    )
    parser.add_argument("--data", metavar="FILE", help=data)
    device = "what to train on (default cuda, if there is a GPU for each process of this machine)"
    parser.add_argument("--device", choices=("cpu", "cuda"), help=device)
    parser.add_argument(
        "--save", metavar="FOLDER", help="write the trained model, with --lora merged, there at the end"
    )
    parser.add_argument(
        "--save-adapter", metavar="FOLDER", help="write the trained adapter there at the end, in PEFT's format"
    )
    parser.add_argument("--steps", type=common.count, default=20, metavar="N", help="optimizer steps (default 20)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of AdamW (default 1e-3)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default 0)")
    parser.add_argument(
        "--timeout", type=common.count, metavar="S", help="seconds a collective waits for others (default 120)"
    )
    parser.add_argument("--checkpoint", metavar="FOLDER", help="save the run there at the end, and what --every says")
    parser.add_argument("--every", type=common.count, metavar="N", help="save after every N steps too")
    parser.add_argument(
        "--keep", type=common.count, metavar="N", help="keep the last N checkpoints that this run saved"
    )
    parser.add_argument("--async-save", action="store_true", help="write them while the training goes on")
    parser.add_argument(
        "--elastic", action="store_true", help="go on with the processes that remain when others are lost"
    )
    copies = "with --elastic, after every N steps copy each process's share into another's memory (default 10)"
    parser.add_argument("--copy-every", type=common.count, metavar="N", help=copies)
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in FOLDER that was saved last")


def run(args: argparse.Namespace) -> int:
    """Check the arguments, then train in processes of its own, or in this one if torchrun started it."""
    common.check(args)
    devices, world = Mesh.parse(args.mesh).devices, os.environ.get("WORLD_SIZE")
    if args.data is not None and not Path(args.data).expanduser().is_file():
        raise InputError(f"there is no file {args.data}", fix="give --data a text or JSONL file")
    if args.checkpoint is None and (args.every or args.keep or args.resume or args.async_save or args.elastic):
        raise CheckpointError(
            "--every, --keep, --async-save, --elastic and --resume say what to do with checkpoints",
            fix="add --checkpoint FOLDER",
        )
    if args.copy_every and not args.elastic:
        raise CheckpointError("--copy-every says what --elastic does", fix="add --elastic")
    _check_pipeline(args)
    adapt = common.adaptations(args)
    if args.save_adapter and args.lora is None and args.qlora is None:
        raise AdaptError("--save-adapter saves the adapter that was trained", fix="add --lora or --qlora")
    if args.save and args.qlora is not None:
        raise AdaptError("--save writes whole weights, and --qlora has them in 4 bits", fix="use --save-adapter")
    args.device, here = _device(args.device, int(os.environ.get("LOCAL_WORLD_SIZE", devices)))
    args.hardware = args.hardware or here
    module, inputs = models.build(args.model, batch=args.batch, seq=args.seq)  # raises here, not in every process
    settings = {k: v for k, v in vars(args).items() if k != "run"} | {"pin": common.pins(args), "adapt": adapt}
    settings["flops"] = flops_of_step(module, inputs, args) if sys.stdout.isatty() else 0.0
    if "RANK" not in os.environ or world is None:
        from . import own_processes, templates

        if args.elastic:
            return elastic.train(settings, devices, own_processes.run, templates.planning)
        return own_processes.run(settings, devices)
    if args.elastic:
        settings = elastic.under_torchrun(settings, int(world), int(os.environ["RANK"]))
        devices = Mesh.parse(settings["mesh"]).devices
    if int(world) != devices:
        nodes = max(1, int(world) // int(os.environ.get("LOCAL_WORLD_SIZE", world)))
        raise MeshError(
            f"the mesh {args.mesh} has {devices} devices, torchrun started {world} processes",
            fix=f"start it with {_of_torchrun(devices, nodes)}",
        )
    from .train_rank import train

    end_with_parent()
    return train(int(os.environ["RANK"]), devices, "env://", settings)


def _of_torchrun(devices: int, nodes: int) -> str:
    """Return the options with which torchrun starts a process a device, on as many nodes as now if they divide them."""
    nodes = nodes if devices % nodes == 0 else 1
    return f"--nnodes {nodes} --nproc-per-node {devices // nodes}" if nodes > 1 else f"--nproc-per-node {devices}"


def _device(asked: str | None, processes: int) -> tuple[str, str]:
    """Return the type of device to train on, as asked, else cuda if this machine has a GPU for each of its processes,
    and what such devices call themselves."""
    import torch

    found = torch.cuda.device_count()
    if asked == "cuda" and found < processes:
        raise MeshError(f"--device cuda needs {processes} GPUs here, there are {found}", fix="leave it out, or use cpu")
    is_gpu = asked != "cpu" and found >= processes
    return ("cuda", torch.cuda.get_device_name()) if is_gpu else ("cpu", "cpu-gloo")


def flops_of_step(module: nn.Module, inputs, args: argparse.Namespace) -> float:
    """Return the FLOPs of a step by the model's mathematics: of the forward, as much for the gradients of values, and
    for those of weights if all of them train. 0.0 for a model that cannot run on the meta device."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from .._torch import tree_map
    from ..frontend.call_signature import split_example

    words, named = tree_map(lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x, split_example(inputs))
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counted:
            module.to("meta")(*words, **named)
    except Exception:  # such as what depends on values
        return 0.0
    return counted.get_total_flops() * (3.0 if args.lora is args.qlora is None else 2.0)


def _check_pipeline(args: argparse.Namespace) -> None:
    """Raise PipelineError for a trace of what has no stages, ScheduleError for a file that cannot be written."""
    if args.trace is not None and not axis_of(Mesh.parse(args.mesh)):
        raise PipelineError("--trace is for a mesh with an axis pp", fix="name one: --mesh pp=2,dp=2")
    if args.trace is not None:
        files.check_name(args.trace)
