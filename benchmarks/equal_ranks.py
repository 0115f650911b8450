"""Measure what it costs that ranks compare their parameters and batches (`check_every` of autopar.compile).

    OMP_NUM_THREADS=1 python benchmarks/equal_ranks.py [--model gpt2] [--mesh dp=2] [--batch 4] [--seq 64]

Prints seconds and CPU seconds of a step, of a check, and the share that checks take at the default interval; medians of
rank 0.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar import models
from autopar.ir.mesh import Mesh
from autopar.runtime.equal_ranks import EVERY


def measured(run: Callable[[], object], times: int) -> tuple[float, float]:
    """Return the medians of wall and CPU seconds of `run`."""
    walls, cpus = [], []
    for _ in range(times):
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return statistics.median(walls), statistics.median(cpus)


def rank(args) -> None:
    """Measure as one rank."""
    mesh = Mesh.parse(args.mesh)
    dist.init_process_group("gloo")
    model, inputs = models.build(args.model, batch=args.batch, seq=args.seq, device="cpu", seed=0)
    device_mesh = init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names)
    model = autopar.compile(model, device_mesh, inputs, check_every=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    check, model._equal_ranks.before = model._equal_ranks.before, lambda module, call: calls.append(call)
    calls: list = []

    def step() -> None:
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    of_step, of_check = measured(step, 5), measured(lambda: check(model, calls[0]), 5)
    if dist.get_rank() == 0:
        print(f"{args.model} on {args.mesh}, batch {args.batch} x {args.seq}: wall and CPU seconds of rank 0")
        for what, (wall, cpu) in (("step", of_step), ("check", of_check)):
            print(f"{what:6s} {wall:8.4f} {cpu:8.4f}")
        shares = [check / step / EVERY for check, step in zip(of_check, of_step)]
        print(f"every {EVERY} calls a check takes {shares[0]:.3%} of the steps, {shares[1]:.3%} of their CPU time")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--mesh", default="dp=2")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        return rank(args)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(Mesh.parse(args.mesh).devices)]
    subprocess.run([*launch, __file__, *sys.argv[1:], "--rank"], check=True, timeout=900)


if __name__ == "__main__":
    main()
