"""A step of torch's optimizers on a compiled model's parameters, and clipping, against the same on plain tensors.

    OMP_NUM_THREADS=1 python benchmarks/optimizers.py [--devices 1] [--width 256] [--layers 12] [--steps 30]

A row is the median CPU time of so many steps of rank 0, both sides taking turns. The plain side has the local parts of
the parameters as plain tensors, so that both update as many elements.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parent.parent))

import autopar
from autopar import models
from tests.helpers import gloo

OPTIMIZERS = [
    ("AdamW", {}), ("AdamW", {"foreach": True}), ("AdamW", {"fused": True}), ("Adam", {"amsgrad": True}),
    ("SGD", {"momentum": 0.9}), ("RMSprop", {}), ("Adagrad", {}),
]  # fmt: skip


def milliseconds(runs: dict, steps: int) -> dict[str, float]:
    """Return the median CPU time of each run, which take turns."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(steps):
        for name, run in runs.items():
            start = time.process_time()
            run()
            found[name].append(time.process_time() - start)
    return {name: 1e3 * statistics.median(times) for name, times in found.items()}


def compare(rank: int, width: int, layers: int, devices: int, steps: int) -> list[tuple[str, float, float]]:
    """Return (what, milliseconds of plain tensors, of the compiled model) of each optimizer and of clipping."""
    text = f"gpt:hidden={width},layers={layers},heads=4,vocab=512,seq=32"
    model, batch = models.build(text, batch=devices, seq=32, device="cpu", seed=0)
    model = autopar.compile(model, init_device_mesh("cpu", (devices,), mesh_dim_names=("dp",)), batch, strategy="fsdp")
    model(**batch).loss.backward()
    plain = []
    for parameter in model.parameters():
        copy = nn.Parameter(parameter.to_local().detach().clone())
        copy.grad = parameter.grad.to_local().detach().clone()
        plain.append(copy)
    rows = []
    for name, options in OPTIMIZERS:
        kind = getattr(torch.optim, name)
        runs = {
            "plain": kind(plain, lr=1e-5, **options).step,
            "ours": kind(model.parameters(), lr=1e-5, **options).step,
        }
        for run in runs.values():
            run()  # makes the state
        found = milliseconds(runs, steps)
        rows.append((f"{name} {' '.join(f'{k}={v}' for k, v in options.items())}", found["plain"], found["ours"]))
    clip = nn.utils.clip_grad_norm_
    runs = {
        "plain": lambda: clip(plain, 1.0),
        "ours": lambda: model.clip_grad_norm_(1.0),
        "torch": lambda: clip(model.parameters(), 1.0),
    }
    found = milliseconds(runs, steps)
    rows.append(("model.clip_grad_norm_", found["plain"], found["ours"]))
    return [*rows, ("torch.nn.utils.clip_grad_norm_", found["plain"], found["torch"])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, value in {"devices": 1, "width": 256, "layers": 12, "steps": 30}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    rows = gloo.run(args.devices, compare, args.width, args.layers, args.devices, args.steps)[0]
    print(
        f"gpt, width {args.width}, {args.layers} layers, fsdp on {args.devices} gloo processes, "
        f"torch {torch.__version__}"
    )
    print(f"{'CPU ms':32}{'plain':>9}{'autopar':>9}")
    for what, plain, ours in rows:
        print(f"{what:32}{plain:9.2f}{ours:9.2f}{ours / plain:8.2f}x")


if __name__ == "__main__":
    main()
