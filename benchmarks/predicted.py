"""Predicted against measured: step time and memory of plans of two small models on two gloo processes of this machine.

    OMP_NUM_THREADS=1 python benchmarks/predicted.py [--hardware mine.toml] [--rounds 12]

Without --hardware the machine is calibrated first (autopar calibrate). All plans are compiled in the same two processes and take
their steps in turn, so that what else the machine does falls on all alike; of the rounds, in each the slower process, the lower
quartile counts, and beside it the CPU time of a process, which says more where other work shares the cores. A step is forward
and backward, as in a plan's `step_seconds`. "by curves" is the plan's compute with each collective that its graphs run priced
alone (autopar/cost/collectives.py). Memory is predicted `peak_bytes`, measured as in benchmarks/peers.py. Kendall's tau compares
the order of pairs of plans whose measured times differ by more than 5 %, within a model and over both.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parent.parent))

import autopar
from autopar import api, calibrate, hardware, models
from autopar.cost.collectives import CollectiveCost
from autopar.cost.measured import SENT
from autopar.lower import lower
from autopar.mesh import Mesh
from benchmarks.peers import _local_bytes, _status_bytes
from tests import gloo

BATCH, SEQ = 8, 64
NOISE = 0.05
MODELS = {
    "gpt": "gpt:hidden=256,layers=3,heads=8,vocab=1024,seq=64",
    "llama": "llama:hidden=256,layers=3,heads=8,kv_heads=4,ffn=704,vocab=1024",
}
PINS = {"gpt": {"*.c_fc.weight": "{}:S(0)"}, "llama": {"*.up_proj.weight": "{}:S(0)"}}


@dataclass(frozen=True)
class Case:
    """One plan: `pinned` pins the first matrix of each MLP to be cut by its rows."""

    model: str
    mesh: str
    strategy: str | None
    pinned: bool = False

    @property
    def pins(self) -> dict[str, str]:
        axis = self.mesh.partition("=")[0]
        return {glob: layout.format(axis) for glob, layout in PINS[self.model].items()} if self.pinned else {}

    @property
    def label(self) -> str:
        return (self.strategy or "auto") + (" pinned" if self.pinned else "")


CASES = [
    Case(model, mesh, strategy, pinned)
    for model in MODELS
    for mesh, strategy, pinned in [
        ("dp=2", "ddp", False), ("dp=2", "zero1", False), ("dp=2", "fsdp", False), ("tp=2", "megatron", False),
        ("tp=2", "megatron_sp", False), ("tp=2", None, False), ("tp=2", None, True),
    ]
]  # fmt: skip


@dataclass
class Row:
    """Seconds and bytes of one case; `by_curves` with collectives priced one by one."""

    case: Case
    predicted: float
    by_curves: float
    predicted_bytes: float
    measured: float = 0.0
    measured_cpu: float = 0.0
    measured_bytes: float = 0.0
    plan: autopar.Plan = field(repr=False, default=None)


def build(model: str, device: str):
    torch.manual_seed(0)
    return models.build(MODELS[model], batch=BATCH, seq=SEQ, device=device)


def predict(case: Case, profile: hardware.Hardware) -> Row:
    """On the meta device, in this process."""
    model, inputs = build(case.model, "meta")
    planned = dict(hardware=profile, strategy=case.strategy, pin=case.pins, baselines=False)
    plan = autopar.plan(model, case.mesh, inputs, **planned)
    mesh = Mesh.parse(case.mesh)
    cost = CollectiveCost(profile, mesh)
    nodes = lower(api.trace(model, inputs), plan, 0).local.graph.nodes
    run = [n.meta["collective"] for n in nodes if n.meta.get("collective")]
    seconds = sum(
        cost.seconds(c.kind, c.axes, c.wire_bytes / SENT[c.kind](math.prod(mesh.size(a) for a in c.axes))) for c in run
    )
    return Row(case, plan.step_seconds, plan.step_seconds - plan.communication_seconds + seconds, plan.peak_bytes, plan=plan)


def compiled(case: Case, file: str) -> tuple:
    model, inputs = build(case.model, "cpu")
    mesh = Mesh.parse(case.mesh)
    return autopar.compile(model, init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names), inputs, plan=file), inputs


def step(module, inputs: dict) -> None:
    module(**inputs).loss.backward()


def race(rank: int, cases: list[Case], folder: str, rounds: int) -> np.ndarray:
    """(case, round, wall and CPU) seconds of a step on this process."""
    warnings.filterwarnings("ignore")
    sides = [compiled(case, f"{folder}/{i}.json") for i, case in enumerate(cases)]
    seconds = np.zeros((len(sides), rounds, 2))
    for i in range(rounds + 2):
        for (module, inputs), found in zip(sides, seconds):
            module.zero_grad()
            dist.barrier()
            start = np.array([time.perf_counter(), time.process_time()])
            step(module, inputs)
            if i >= 2:  # the first ones allocate
                found[i - 2] = np.array([time.perf_counter(), time.process_time()]) - start
    return seconds


def peaks(rank: int, cases: list[Case], folder: str) -> list[int]:
    """By case, the largest sum of live bytes of a step with AdamW on this process."""
    warnings.filterwarnings("ignore")
    ctypes.CDLL("libc.so.6").mallopt(-3, 2**14)  # large blocks are mapped one by one, so that the high-water mark follows them
    return [_peak(case, f"{folder}/{i}.json") for i, case in enumerate(cases)]


def _peak(case: Case, file: str) -> int:
    module, inputs = compiled(case, file)
    optimizer = torch.optim.AdamW(module.parameters())
    for _ in range(2):
        step(module, inputs)
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    kept = sum(_local_bytes(t) for t in (*module.parameters(), *state))
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
    before = _status_bytes("VmRSS")
    step(module, inputs)
    return kept + _status_bytes("VmHWM") - before


def kendall_tau(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Pairs in the same order less pairs in the other one, over all pairs whose measured times differ by more than NOISE."""
    pairs = [(i, j) for i, j in itertools.combinations(range(len(measured)), 2) if abs(measured[i] / measured[j] - 1) > NOISE]
    same = sum(np.sign(predicted[i] - predicted[j]) * np.sign(measured[i] - measured[j]) for i, j in pairs)
    return float(same / max(len(pairs), 1))


def report(rows: list[Row]) -> None:
    columns = f"{'predicted ms':>13}{'by curves':>11}{'measured':>10}{'CPU':>8}{'MiB':>9}{'measured':>10}"
    print(f"{'model':8}{'mesh':8}{'strategy':14}{columns}")
    for r in rows:
        seconds = f"{r.predicted * 1e3:13.1f}{r.by_curves * 1e3:11.1f}{r.measured * 1e3:10.1f}{r.measured_cpu * 1e3:8.1f}"
        bytes_ = f"{r.predicted_bytes / 2**20:9.1f}{r.measured_bytes / 2**20:10.1f}"
        print(f"{r.case.model:8}{r.case.mesh:8}{r.case.label:14}{seconds}{bytes_}")
    groups = {model: [r for r in rows if r.case.model == model] for model in MODELS} | {"both": rows}
    for name, against in itertools.product(("predicted", "by_curves"), ("measured", "measured_cpu")):
        pairs = {key: [(getattr(r, name), getattr(r, against)) for r in some] for key, some in groups.items()}
        taus = ", ".join(f"{key} {kendall_tau(*zip(*some)):.2f}" for key, some in pairs.items())
        error = np.mean([abs(a / b - 1) for a, b in pairs["both"]])
        print(f"{name} against {against}: Kendall's tau {taus}; mean error {error:.0%}")
    print(f"memory: mean error {np.mean([abs(r.predicted_bytes / r.measured_bytes - 1) for r in rows]):.0%}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", metavar="FILE", help="a calibrated profile (default: calibrate now)")
    parser.add_argument("--rounds", type=int, default=12)
    a = parser.parse_args()
    warnings.filterwarnings("ignore")
    if a.hardware:
        profile = hardware.load(a.hardware)
    else:
        measured = calibrate.measurements("gloo", 2)
        profile = calibrate.to_profile(measured, hardware.load("cpu-gloo"), "here", calibrate.fingerprint("gloo"))
    rows = [predict(case, profile) for case in CASES]
    with tempfile.TemporaryDirectory() as folder:
        for i, row in enumerate(rows):
            row.plan.save(f"{folder}/{i}.json")
        seconds = np.quantile(np.max(gloo.run(2, race, CASES, folder, a.rounds, seconds=1800), axis=0), 0.25, axis=1)
        bytes_ = np.max(gloo.run(2, peaks, CASES, folder, seconds=1800), axis=0)
    for row, (wall, cpu), most in zip(rows, seconds, bytes_):
        row.measured, row.measured_cpu, row.measured_bytes = float(wall), float(cpu), float(most)
    report(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
