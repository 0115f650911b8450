"""Measure what changing lengths cost: 30 steps of a fine-tune, batches padded to their longest, with 15 lengths.

    OMP_NUM_THREADS=1 python benchmarks/lengths.py                           # GPT-2, 124 M parameters, dp=2
    OMP_NUM_THREADS=1 python benchmarks/lengths.py --mesh dp=2,tp=2 \\
        --model llama:hidden=256,layers=4,heads=4,ffn=512,vocab=1024

Prints for each step its length and CPU seconds of rank 0, which other programs on the machine disturb least, and how
many calls were captured. What is outside of the steps is what a step of that length takes longer the first time than
the second: each length comes twice. The first length has a step before, so that what a job's start costs is not in it
(benchmarks/startup.py). With --profile FILE, rank 0 writes what Python did in the first steps.
"""

from __future__ import annotations

import argparse
import cProfile
import random
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar import models
from autopar.ir.mesh import Mesh


def train(rank: int, args, folder: str) -> None:
    """Train as one rank; rank 0 prints."""
    mesh = Mesh.parse(args.mesh)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=mesh.devices)
    torch.set_num_threads(1)
    lengths = random.Random(0).sample(range(args.longest // 4, args.longest), 15)
    source, first = models.build(args.model, batch=args.batch, seq=lengths[0], device="cpu", seed=0)
    high = int(max(value.max() for value in first.values()))
    model = autopar.compile(source, init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names), first,
                            strategy=args.strategy)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    seconds: dict[int, list[float]] = {length: [] for length in lengths}
    profile = cProfile.Profile() if args.profile and rank == 0 else None
    for at, length in enumerate([lengths[0], *lengths * 2]):
        if profile and at in (1, len(lengths) + 1):
            profile.enable() if at == 1 else profile.disable()
        ids = torch.randint(high, (args.batch, length), generator=torch.Generator().manual_seed(length))
        batch = {name: ids for name in first}
        dist.barrier()
        start = time.process_time()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if at == 0:
            continue
        seconds[length].append(time.process_time() - start)
        captured = 1 + model._captures.traces
        if rank == 0:
            print(f"length {length:5d}  {seconds[length][-1]:7.3f} s  captures {captured}", flush=True)
    if rank == 0:
        outside = sum(first - again for first, again in seconds.values())
        total = sum(map(sum, seconds.values()))
        print(f"{args.model} on {args.mesh}, batch {args.batch}: {len(lengths)} lengths, {captured} captures; "
              f"{outside:.1f} of {total:.1f} s outside of the steps ({outside / total:.1%})")  # fmt: skip
        if profile:
            profile.dump_stats(args.profile)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--mesh", default="dp=2")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--longest", type=int, default=128)
    parser.add_argument("--strategy")
    parser.add_argument("--profile")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(train, (args, folder), Mesh.parse(args.mesh).devices)


if __name__ == "__main__":
    main()
