"""Measure the cost of ranks that compare parameters and batches (`check_every` of autopar.compile), and their calls.

    OMP_NUM_THREADS=1 python benchmarks/equal_ranks.py [--model gpt2] [--mesh dp=2] [--batch 4] [--seq 64]

Prints seconds and CPU seconds of a step, of a check, of noting the calls of a step and of comparing them with another
rank, and the shares that they take at the default intervals; medians of rank 0.
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
from autopar.processes import comparison, watch
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

    def note() -> None:
        for log in [*logs.groups.values()] * 2:  # of the forward and of the backward
            log.add(b"the forward graph")
        logs.step({mesh for mesh, _ in logs.groups}, has_gradients=True)

    logs = watch._current.logs
    of_step, of_check = measured(step, 5), measured(lambda: check(model, calls[0]), 5)
    of_notes, of_look = measured(note, 25), measured(lambda: comparison.look(watch._current), 25)
    if dist.get_rank() == 0:
        print(f"{args.model} on {args.mesh}, batch {args.batch} x {args.seq}: wall and CPU seconds of rank 0")
        rows = {"step": of_step, "check": of_check, "notes": of_notes, "comparison": of_look}
        for what, (wall, cpu) in rows.items():
            print(f"{what:10s} {wall:10.6f} {cpu:10.6f}")
        shares = [check / step / EVERY for check, step in zip(of_check, of_step)]
        print(f"every {EVERY} calls a check takes {shares[0]:.3%} of the steps, {shares[1]:.3%} of their CPU time")
        print(f"noting a step's calls takes {of_notes[0] / of_step[0]:.3%} of it; a comparison every", end=" ")
        print(f"{comparison.SECONDS:g} s takes {of_look[1] / comparison.SECONDS:.3%} of a core")
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
