"""Measure a job's start on each rank: from `compile` to the end of the first step, without a cache, with an empty
one and with the one that the start before has filled.

    OMP_NUM_THREADS=1 python benchmarks/startup.py                     # GPT-2, 124 M parameters, two ranks
    OMP_NUM_THREADS=1 python benchmarks/startup.py --mesh tp=4 \\
        --model llama:hidden=64,layers=32,heads=4,ffn=128,vocab=256

Prints CPU seconds, which other programs on the machine disturb least, and for comparison those of the plain model in
one process. Imports are counted by themselves: those of autopar, and torch._dynamo, which torch's own optimizers import
when they are made, whatever the model. A second step is there to tell what of the first one is the step.
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

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autopar import models
from autopar.ir.mesh import Mesh


def start(args) -> None:
    """Start once as one rank, and print what it took as JSON."""
    mesh = Mesh.parse(args.mesh)
    dist.init_process_group("gloo")
    model, inputs = models.build(args.model, batch=args.batch, seq=args.seq, device="cpu", seed=0)
    dist.barrier()
    times = [time.process_time()]
    entry = [importlib.import_module(name) for name in ("torch._dynamo", "autopar.api.entry")][-1]
    times.append(time.process_time())
    if not args.plain:
        model = entry.compile(model, init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names), inputs)
    times.append(time.process_time())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(2):
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.process_time())
    seconds = [after - before for before, after in zip(times, times[1:])]
    Path(args.out, f"{dist.get_rank()}.json").write_text(json.dumps([*seconds, loss.item()]))
    dist.destroy_process_group()


def run(args, cache: str, plain: bool = False) -> list[list[float]]:
    """Start once on all ranks, or in one process without autopar; return the seconds of each."""
    devices = 1 if plain else Mesh.parse(args.mesh).devices
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(devices), __file__, "--out",
                   folder, "--model", args.model, "--mesh", args.mesh, "--batch", str(args.batch),
                   "--seq", str(args.seq), *(["--plain"] if plain else [])]  # fmt: skip
        subprocess.run(command, env=os.environ | {"AUTOPAR_CACHE": cache}, check=True, timeout=900, capture_output=True)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(devices)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--mesh", default="dp=2")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=16)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.out:
        return start(args)
    print(f"{args.model} on {args.mesh}, batch {args.batch} x {args.seq}: CPU seconds of a rank\n")
    print("start                rank  imports  compile  first step  second step  compile + first step")
    with tempfile.TemporaryDirectory() as cache:
        starts = (
            ("plain", "off", True),
            ("no cache", "off", False),
            ("empty cache", cache, False),
            ("cache", cache, False),
        )
        for name, *how in starts:
            for rank, (imports, compiled, first, second, _) in enumerate(run(args, *how)):
                print(
                    f"{name:<19}  {rank:4}  {imports:7.2f}  {compiled:7.2f}  {first:10.2f}  {second:11.2f}  "
                    f"{compiled + first:20.2f}"
                )


if __name__ == "__main__":
    main()
