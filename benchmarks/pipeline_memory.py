"""Predicted against tracked memory of every rank of steps of micro-batches, through stages and without, of two small
models on gloo processes of this machine.

    OMP_NUM_THREADS=1 python benchmarks/pipeline_memory.py [--only "gpt fsdp"] > benchmarks/results/pipeline_memory.txt

Predicted is what the plan says of a rank (autopar/planner/pipeline/evaluate.py), tracked the bytes of all live tensors
of a step with its AdamW update (autopar/utils/allocation_tracker.py): of the steps after the first that one in which
the rank held most. The batch is the caller's and does not count. What is alive at both peaks is listed where they
differ by more than 10 %. Rows `host` are planned under as much less memory as
30 % of what the row without recomputation saves, with values on a host whose link is fast, if that is fastest; what is
there does not count.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parent.parent))

import autopar
from autopar import models
from autopar.api import entry as api
from autopar.hardware.profile import Host, load
from autopar.ir.mesh import Mesh
from autopar.planner.objective.memory_timeline import SAVED
from tests.helpers import gloo
from tests.helpers.allocations import training_step

BATCH, SEQ, MICRO_BATCHES = 16, 64, 8
MODELS = {
    "gpt": "gpt:hidden=192,layers=6,heads=6,vocab=1024,seq=64",
    "llama": "llama:hidden=192,layers=6,heads=6,kv_heads=3,ffn=512,vocab=1024",
}
FLAT = [("dp=2", "ddp"), ("dp=2", "zero1"), ("dp=2", "zero2"), ("dp=2", "fsdp")]  # which have no schedule
MESHES = [*FLAT, ("pp=2", None), ("pp=4", None), ("pp=2,dp=2", "ddp"), ("pp=2,dp=2", "fsdp"), ("pp=2,tp=2", "megatron")]
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv")
AGAIN = ("gpipe", "1f1b")  # for which everything is computed again too, or waits on the host
ON_HOST, SHARE = "host", 0.3
MACHINE = replace(load("cpu-gloo"), host=Host(1e12, 4e9, 10**9))
NEAR = 0.1


@dataclass(frozen=True)
class Case:
    model: str
    mesh: str
    strategy: str | None
    schedule: str
    recompute: str

    @property
    def ranks(self) -> int:
        return Mesh.parse(self.mesh).devices

    @property
    def label(self) -> str:
        return f"{self.model:7}{self.mesh:11}{self.strategy or '-':10}{self.schedule:18}{self.recompute:6}"


@dataclass(frozen=True)
class Held:
    """Bytes of a rank at its peak."""

    bytes_: float
    kinds: dict[str, float]


def cases(only: str) -> list[Case]:
    """Those whose label has all the words."""
    how = [(s, "none") for s in SCHEDULES] + [(s, again) for again in ("full", ON_HOST) for s in AGAIN]
    every = itertools.product(MODELS, MESHES, how)
    found = [Case(model, mesh, strategy, schedule, again) for model, (mesh, strategy), (schedule, again) in every]
    found = [case for case in found if "pp" in case.mesh or case.schedule == "1f1b"]
    found = [case for case in found if case.recompute != ON_HOST or case.mesh == "pp=2"]  # where that is always needed
    return [case for case in found if {*only.split()} <= {*case.label.split()}]


def build(case: Case, device: str):
    torch.manual_seed(0)
    return models.build(MODELS[case.model], batch=BATCH, seq=SEQ, device=device)


def predicted(case: Case, file: str) -> list[Held]:
    """Return what the plan says that each rank holds, and save the plan."""
    model, inputs = build(case, "meta")
    asked = {"hardware": MACHINE, "strategy": case.strategy, "micro_batches": MICRO_BATCHES, "baselines": False}
    asked |= {"fixes": False} | ({"schedule": case.schedule} if "pp" in case.mesh else {})
    asked["recompute"] = "none" if case.recompute == ON_HOST else case.recompute
    found = api.search(model, case.mesh, inputs, **asked)
    if case.recompute == ON_HOST:
        memory = found.plan.peak_bytes - SHARE * found.plan.at_peak[SAVED]
        asked |= {"memory": memory, "offload": "activations"}
        found = api.search(model, case.mesh, inputs, **asked)
    found.plan.save(file)
    if not found.staged:
        return [Held(found.plan.peak_bytes, dict(found.plan.at_peak))] * case.ranks
    pp_ranks = [found.plan.mesh.coordinate(rank)["pp"] for rank in range(case.ranks)]
    return [
        Held(sum(found.staged.evaluated.memory[pp_rank].values()), dict(found.staged.evaluated.memory[pp_rank]))
        for pp_rank in pp_ranks
    ]


def track(rank: int, cases: list[Case], files: list[str]) -> list[Held]:
    """Return what a step of each case held at its peak on this process."""
    warnings.filterwarnings("ignore")
    found = []
    for case, file in zip(cases, files):
        model, inputs = build(case, "cpu")
        mesh = Mesh.parse(case.mesh)
        device_mesh = init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names)
        module = autopar.compile(model, device_mesh, inputs, plan=file)
        seen = training_step(module, inputs, torch.optim.AdamW(module.parameters()), steps=2)
        found.append(Held(seen.peak_bytes, seen.at_peak))
        del module, seen
    return found


def listed(kinds: dict[str, float]) -> str:
    return ", ".join(f"{kind} {bytes_ / 2**20:.2f}" for kind, bytes_ in sorted(kinds.items()) if bytes_ >= 2**13)


def report(case: Case, plan: list[Held], seen: list[Held]) -> list[float]:
    """Prints a row; predicted / tracked by rank."""
    ratios = [a.bytes_ / b.bytes_ for a, b in zip(plan, seen)]
    sizes = f"{max(h.bytes_ for h in plan) / 2**20:10.2f}{max(h.bytes_ for h in seen) / 2**20:9.2f}"
    print(f"{case.label}{sizes}  " + " ".join(f"{r:6.3f}" for r in ratios))
    for rank, ratio in enumerate(ratios):
        if abs(ratio - 1) > NEAR:
            print(
                f"    rank {rank} predicted: {listed(plan[rank].kinds)}\n    rank {rank} tracked: "
                f"{listed(seen[rank].kinds)}"
            )
    sys.stdout.flush()
    return ratios


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help='plans with these words in their row, such as "gpt pp=2,dp=2 fsdp"')
    a = parser.parse_args()
    warnings.filterwarnings("ignore")
    print(f"batch {BATCH} x {SEQ}, {MICRO_BATCHES} micro-batches; " + "; ".join(MODELS.values()))
    print("predicted and tracked: MiB of the fullest rank; ratio: predicted / tracked by rank")
    print(f"{'model':7}{'mesh':11}{'strategy':10}{'schedule':18}{'again':6}{'predicted':>10}{'tracked':>9}  ratio")
    ratios = []
    for ranks in (2, 4):
        some = [case for case in cases(a.only) if case.ranks == ranks]
        with tempfile.TemporaryDirectory() as folder:
            files = [f"{folder}/{i}.json" for i, _ in enumerate(some)]
            plans = [predicted(case, file) for case, file in zip(some, files)]
            found = gloo.run(ranks, track, some, files, seconds=3600)
        for case, plan, *seen in zip(some, plans, *found):
            ratios += report(case, plan, seen)
    near = sum(abs(r - 1) <= NEAR for r in ratios)
    print(f"predicted / tracked of {len(ratios)} ranks: {min(ratios):.3f} to {max(ratios):.3f}, mean "
          f"{np.mean(ratios):.3f}; {near} within {NEAR:.0%}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
