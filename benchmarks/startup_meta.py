"""Measure the compiling of a large model before its weights are read, against planning it: Llama-3-8B's shapes.

    OMP_NUM_THREADS=1 python benchmarks/startup_meta.py
    OMP_NUM_THREADS=1 python benchmarks/startup_meta.py --model llama3-8b --mesh dp=2 --batch 2 --seq 2048

Prints CPU seconds: of `autopar.plan` in one process, and on each rank of what `autopar.compile` does of the same call
up to its program (trace, plan, lower), without a cache, with an empty one and with the one that the start before has
filled. Imports are not counted.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar import models
from autopar.ir.mesh import Mesh

ASKED = dict(hardware="h100", memory="2000GiB", precision="bf16", execution="eager")  # two devices stand for many


def start(args) -> None:
    """Plan once, or trace, plan and lower once as one rank; print the seconds as JSON."""
    mesh = Mesh.parse(args.mesh)
    model, inputs = models.build(args.model, batch=args.batch, seq=args.seq, device="meta")
    for name in ("torch._dynamo", "autopar.api.entry"):
        importlib.import_module(name)
    from autopar.api.call_compiler import CallCompiler
    from autopar.utils.gc_pause import paused_collector

    dist.init_process_group("gloo")
    times = [time.process_time()]
    if args.plan:
        autopar.plan(model, mesh, inputs, **ASKED)
        times.append(time.process_time())
    else:
        options = ASKED | dict(
            optimizer="adamw", reduce_dtype=None, state_dtype=None, strategy=None, pin=None, strict=False,
            micro_batches=None, offload="none", schedule="auto", stages_per_rank=None, baselines=False, tile="auto",
        )  # fmt: skip
        device_mesh = init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names)
        times = [time.process_time()]
        with paused_collector():  # as compile does
            compiler = CallCompiler(model, device_mesh, "global", None, None, options)
            traced = compiler.trace(inputs, True)
            times.append(time.process_time())
            plan = compiler.plan(traced)
            times.append(time.process_time())
            compiler.lower(traced, plan)
            times.append(time.process_time())
    seconds = [after - before for before, after in zip(times, times[1:])]
    Path(args.out, f"{dist.get_rank()}.json").write_text(json.dumps(seconds))
    dist.destroy_process_group()


def run(args, cache: str, plan: bool) -> list[list[float]]:
    """Start once; return the seconds of each rank."""
    devices = 1 if plan else Mesh.parse(args.mesh).devices
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(devices), __file__, "--out",
                   folder, "--model", args.model, "--mesh", args.mesh, "--batch", str(args.batch),
                   "--seq", str(args.seq), *(["--plan"] if plan else [])]  # fmt: skip
        subprocess.run(command, env=os.environ | {"AUTOPAR_CACHE": cache}, check=True, timeout=900, capture_output=True)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(devices)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--mesh", default="dp=2")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    parser.add_argument("--plan", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.out:
        return start(args)
    ((planned,),) = run(args, "off", plan=True)
    print(
        f"{args.model} on {args.mesh}, batch {args.batch} x {args.seq}: CPU seconds; autopar.plan takes {planned:.2f}\n"
    )
    print("start        rank  trace   plan  lower    all  all / autopar.plan")
    with tempfile.TemporaryDirectory() as cache:
        for name, folder in (("no cache", "off"), ("empty cache", cache), ("cache", cache)):
            for rank, seconds in enumerate(run(args, folder, plan=False)):
                parts = "  ".join(f"{s:5.2f}" for s in (*seconds, sum(seconds)))
                print(f"{name:<11}  {rank:4}  {parts}  {sum(seconds) / planned:18.2f}")


if __name__ == "__main__":
    main()
