"""Compare the memory of a step whose graphs are compiled with that of the same graphs op by op, with the plan, and with
torch.compile of the model itself.

    OMP_NUM_THREADS=1 AUTOPAR_CACHE=off python benchmarks/compiled_memory.py

One process, fp32. A step is forward and backward, the second one of each kind. Its peak is the largest sum of what
torch's profiler sees allocated and freed, parameters and inputs not counted, gradients counted. Inductor's kernels are
those of a CPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent.parent))

import autopar
from autopar import models
from autopar.utils.format import table

MIB = 2**20
MODELS = {
    "gpt": ("gpt:hidden=256,layers=6,heads=4,vocab=512,seq=256", 4, 256),
    "llama": ("llama:hidden=256,layers=6,heads=8,kv_heads=4,ffn=704,vocab=512", 4, 256),
    "vit": ("vit-tiny", 16, 1),
}  # fmt: skip


def peak_bytes(step: Callable[[], None]) -> int:
    """Return the most that a step holds of what it allocates."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    live = most = 0
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


def peak_of(module, batch: dict) -> int:
    """Return the peak of the second step of a module."""

    def step() -> None:
        module(**batch).loss.backward()

    step()
    module.zero_grad()
    return peak_bytes(step)


def row(name: str) -> list[str]:
    text, batch_size, seq = MODELS[name]
    sizes = {"batch": batch_size, "seq": seq, "device": "cpu"}
    found, plan = {}, None
    for execution in ("eager", "compiled"):
        model, batch = models.build(text, **sizes)
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        parallel = autopar.compile(model, mesh, batch, execution=execution, strategy="ddp")
        found[execution] = peak_of(parallel, batch)
        plan = parallel.plan
    model, batch = models.build(text, **sizes)
    found["torch"] = peak_of(torch.compile(model), batch)
    state_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    predicted = plan.peak_bytes - state_bytes - 2 * state_bytes  # AdamW's two states
    return [name, *(f"{n / MIB:.1f}" for n in (predicted, found["eager"], found["compiled"], found["torch"]))]


def main() -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29411"}
    dist.init_process_group("gloo", rank=0, world_size=1)
    rows = [row(name) for name in MODELS]
    print("\n".join(table(["model", "planned MiB", "op by op", "compiled", "torch.compile"], rows)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
