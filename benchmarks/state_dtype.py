"""Measure what training loses where AdamW's state is kept in bfloat16, by beta2.

    OMP_NUM_THREADS=1 python benchmarks/state_dtype.py [--steps 600] [--seeds 2]

A row is the loss of a small model on the corpus, the mean of the last tenth of the steps, with state in the type of the
parameters and in bfloat16, on one device: on several the same numbers are computed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parent.parent))

import autopar
from autopar import models
from autopar.models.corpus import batches

MODEL, BATCH, SEQ = "gpt:hidden=64,layers=2,heads=4,vocab=256,seq=64", 8, 64
BETA2 = (0.999, 0.99, 0.95)
KEPT = (None, "bf16")


def loss_of(kept: str | None, beta2: float, steps: int, seed: int) -> float:
    """Return the mean loss of the last tenth of the steps."""
    torch.manual_seed(seed)
    source, example = models.build(MODEL, batch=BATCH, seq=SEQ, device="cpu", seed=seed)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    model = autopar.compile(source, mesh, example, state_dtype=kept)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, beta2))
    stream, losses = batches(BATCH, SEQ, 256, seed), []
    for _ in range(steps):
        loss = model(**next(stream)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return statistics.mean(losses[-max(1, steps // 10) :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo")
    warnings.simplefilter("ignore")
    print(f"{MODEL}, {args.steps} steps of {BATCH} x {SEQ} bytes, {args.seeds} seeds: loss of the last tenth")
    print("beta2  seed  state in fp32  state in bf16")
    for beta2 in BETA2:
        for seed in range(args.seeds):
            wide, narrow = (loss_of(kept, beta2, args.steps, seed) for kept in KEPT)
            print(f"{beta2:<5}  {seed:>4}  {wide:>13.3f}  {narrow:>13.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
