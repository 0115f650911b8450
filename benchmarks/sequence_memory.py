"""Memory of a training step by device as a sequence is cut over 1, 2, 4 and 8 gloo processes.

    OMP_NUM_THREADS=1 python benchmarks/sequence_memory.py [--length 8192] >> benchmarks/results/sequence_memory.txt

A Llama of two layers on one row of tokens, in fp32. What the allocation tracker sees at the peak of a step without
parameters, gradients and the optimizer's state, which these strategies do not cut, on the rank where that is most;
times the processes, over that of one process: 1.00 where memory falls as 1/P. Gathered keys are whole on each.
"in all" is the peak with what is not cut, beside that of the plan.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parent.parent))

import autopar
from autopar.models import build
from autopar.utils.format import table
from tests.helpers import gloo
from tests.helpers.allocations import training_step

TEXT = "llama:hidden=256,layers=2,heads=8,kv_heads=8,ffn=512,vocab=64,seq={}"
STRATEGIES = ("ring", "ulysses", "all_gather_kv")
KEPT = ("parameters", "buffers", "optimizer", "gradients")
MIB = 2**20


def measured(rank: int, size: int, strategy: str, length: int) -> tuple[int, int, float]:
    """Return the bytes at the peak that a sequence makes, and all, as the tracker sees them, and those of the plan."""
    model, inputs = build(TEXT.format(length), batch=1, seq=length, device="cpu")
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    module = autopar.compile(model, mesh, inputs, strategy=strategy, precision="fp32", tile="none")
    seen = training_step(module, inputs, torch.optim.SGD(module.parameters(), lr=1e-3), steps=2)
    made = sum(bytes_ for kind, bytes_ in seen.at_peak.items() if kind not in KEPT)
    return made, seen.peak_bytes, module.plan.peak_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--ranks", default="1,2,4,8")
    args = parser.parse_args()
    print(TEXT.format(args.length), "fp32")
    rows = []
    for strategy in STRATEGIES:
        whole = 0.0
        for size in map(int, args.ranks.split(",")):
            found = gloo.run(size, measured, size, strategy, args.length, seconds=600)
            most, peak, planned = (max(values) for values in zip(*found))
            whole = whole or most * size
            share = f"{most * size / whole:.3f}"
            rows.append([strategy, str(size), *(f"{bytes_ / MIB:.1f}" for bytes_ in (most, peak, planned)), share])
    print("\n".join(table(["strategy", "ranks", "MiB", "in all", "planned", "times ranks, of one"], rows)))


if __name__ == "__main__":
    main()
