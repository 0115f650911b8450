"""Predicted against measured: step time and memory of plans of two small models on two (or four) gloo processes of this
machine.

    OMP_NUM_THREADS=1 python benchmarks/predicted.py [--hardware mine.toml] [--rounds 12] [--ranks 4]
    OMP_NUM_THREADS=1 python benchmarks/predicted.py --memory-only > benchmarks/results/memory.txt

Without --hardware the machine is calibrated first (autopar calibrate). All plans are compiled in the same processes and
take their steps in turn, two each, of which the second counts (as in training, where a step follows its like), so that
what else the machine does falls on all alike; of the rounds, in each the slower process, the lower quartile counts, and
beside it the CPU time of a process, which says more where other work shares the cores. A step is forward and backward,
as in a plan's `step_seconds`. "by curves" is the plan's compute with each collective that its graphs run priced alone
(autopar/cost/collectives.py). Memory is predicted `peak_bytes`, measured as in benchmarks/peers.py, and tracked: bytes
of all live tensors of a step with its AdamW update (autopar/utils/allocation_tracker.py), of the rank that holds most.
Kendall's tau compares the order of pairs of plans whose measured times differ by more than 5 %, within a model and over
both; the mean error is also that after one factor for all plans, which a machine whose speed drifts between calibration
and measurement changes.

With --memory-only there are more plans, and tracked memory alone; what is alive at both peaks is listed where they
differ by more than 10 %, or where more is alive than was predicted. Predictions are for the profile cpu-gloo then.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import math
import os
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
from autopar import calibrate, compiler, models
from autopar.compiler import lower
from autopar.cost.collectives import CollectiveCost
from autopar.cost.measured import SENT
from autopar.hardware import profile as hardware
from autopar.ir.mesh import Mesh
from benchmarks.peers import _local_bytes, _status_bytes
from tests.helpers import gloo
from tests.helpers.allocations import training_step

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
    recompute: str = "auto"
    precision: str = "fp32"

    @property
    def pins(self) -> dict[str, str]:
        axis = self.mesh.partition("=")[0]
        return {glob: layout.format(axis) for glob, layout in PINS[self.model].items()} if self.pinned else {}

    @property
    def label(self) -> str:
        words = [self.strategy or "auto", "pinned" if self.pinned else "", self.recompute, self.precision]
        return " ".join(w for i, w in enumerate(words) if w and (i == 0 or w not in ("auto", "fp32")))


def cases(ranks: int) -> list[Case]:
    """The plans whose times are compared."""
    dp, tp = f"dp={ranks}", f"tp={ranks}"
    plans = [(dp, "ddp", False), (dp, "zero1", False), (dp, "fsdp", False), (tp, "megatron", False),
             (tp, "megatron_sp", False), (tp, None, False), (tp, None, True)]  # fmt: skip
    if ranks == 4:
        plans += [("dp=2,tp=2", "megatron", False), ("dp=2,tp=2", None, False)]
    return [Case(model, mesh, strategy, pinned) for model in MODELS for mesh, strategy, pinned in plans]


MEMORY_CASES = cases(2) + [
    Case(model, "tp=2" if strategy.startswith("megatron") else "dp=2", strategy, recompute=recompute,
         precision=precision)
    for model in MODELS
    for strategy, recompute, precision in [
        ("ddp", "full", "fp32"), ("zero1", "full", "fp32"), ("fsdp", "selective", "fp32"), ("fsdp", "full", "fp32"),
        ("megatron_sp", "selective", "fp32"), ("megatron", "full", "fp32"), ("ddp", "auto", "bf16"),
        ("fsdp", "auto", "bf16"),
    ]
]  # fmt: skip


@dataclass(frozen=True)
class Tracked:
    """Most bytes alive at one time on a rank, and what they were."""

    peak_bytes: int
    at_peak: dict[str, int]


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
    tracked: Tracked | None = None
    plan: autopar.Plan = field(repr=False, default=None)


def build(model: str, device: str):
    torch.manual_seed(0)
    return models.build(MODELS[model], batch=BATCH, seq=SEQ, device=device)


def planned(case: Case, profile: hardware.Hardware) -> tuple:
    """A plan, with its model and inputs on the meta device."""
    model, inputs = build(case.model, "meta")
    options = dict(
        hardware=profile, strategy=case.strategy, pin=case.pins, recompute=case.recompute, precision=case.precision
    )
    return autopar.plan(model, case.mesh, inputs, baselines=False, **options), model, inputs


def predict(case: Case, profile: hardware.Hardware) -> Row:
    """In this process."""
    plan, model, inputs = planned(case, profile)
    cost = CollectiveCost(profile, (mesh := Mesh.parse(case.mesh)))
    nodes = lower(compiler.trace(model, inputs), plan, 0).local.graph.nodes
    run = [n.meta["collective"] for n in nodes if n.meta.get("collective")]
    seconds = sum(
        cost.seconds(c.kind, c.axes, c.wire_bytes / SENT[c.kind](math.prod(mesh.size(a) for a in c.axes))) for c in run
    )
    return Row(
        case, plan.step_seconds, plan.step_seconds - plan.communication_seconds + seconds, plan.peak_bytes, plan=plan
    )


def compiled(case: Case, file: str) -> tuple:
    model, inputs = build(case.model, "cpu")
    mesh = Mesh.parse(case.mesh)
    device_mesh = init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names)
    return autopar.compile(model, device_mesh, inputs, plan=file, precision=case.precision), inputs


def step(module, inputs: dict) -> None:
    module(**inputs).loss.backward()


def race(rank: int, cases: list[Case], folder: str, rounds: int) -> np.ndarray:
    """(case, round, wall and CPU) seconds of a step on this process."""
    warnings.filterwarnings("ignore")
    sides = [compiled(case, f"{folder}/{i}.json") for i, case in enumerate(cases)]
    seconds = np.zeros((len(sides), rounds, 2))
    for i in range(rounds + 2):
        for (module, inputs), found in zip(sides, seconds):
            for _ in range(2):
                module.zero_grad()
                dist.barrier()
                start = np.array([time.perf_counter(), time.process_time()])
                step(module, inputs)
            if i >= 2:  # the first ones allocate
                found[i - 2] = np.array([time.perf_counter(), time.process_time()]) - start
    return seconds


def peaks(rank: int, cases: list[Case], folder: str) -> list[int]:
    """Return for each case the largest sum of live bytes of a step with AdamW on this process."""
    warnings.filterwarnings("ignore")
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "set below"  # which a compile leaves as it is then
    ctypes.CDLL("libc.so.6").mallopt(
        -3, 2**14
    )  # large blocks are mapped one by one, so that the high-water mark follows them
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


def track(rank: int, cases: list[Case], folder: str) -> list[Tracked]:
    """Return what a step of each case with AdamW held at its peak on this process."""
    warnings.filterwarnings("ignore")
    found = []
    for i, case in enumerate(cases):
        module, inputs = compiled(case, f"{folder}/{i}.json")
        seen = training_step(module, inputs, torch.optim.AdamW(module.parameters()))
        found.append(Tracked(seen.peak_bytes, seen.at_peak))
        del module, seen
    return found


def tracked(plans: Sequence[tuple[Case, autopar.Plan]], ranks: int = 2) -> list[Tracked]:
    """Return for each plan what the rank that holds most held at its peak."""
    with tempfile.TemporaryDirectory() as folder:
        for i, (_, plan) in enumerate(plans):
            plan.save(f"{folder}/{i}.json")
        found = gloo.run(ranks, track, [case for case, _ in plans], folder, seconds=1800)
    return [max(of_case, key=lambda t: t.peak_bytes) for of_case in zip(*found)]


def report_memory(plans: Sequence[tuple[Case, autopar.Plan]], found: Sequence[Tracked]) -> None:
    def listed(kinds: dict[str, float]) -> str:
        return ", ".join(f"{kind} {bytes_ / 2**20:.2f}" for kind, bytes_ in sorted(kinds.items()) if bytes_ >= 2**13)

    print(f"{'model':8}{'mesh':8}{'strategy':24}{'predicted MiB':>14}{'tracked':>10}{'ratio':>8}")
    ratios = []
    for (case, plan), seen in zip(plans, found):
        ratios.append(plan.peak_bytes / seen.peak_bytes)
        sizes = f"{plan.peak_bytes / 2**20:14.2f}{seen.peak_bytes / 2**20:10.2f}"
        print(f"{case.model:8}{case.mesh:8}{case.label:24}{sizes}{ratios[-1]:8.3f}")
        if not 1.0 <= ratios[-1] <= 1.1:
            print(f"    predicted: {listed(plan.at_peak)}\n    tracked: {listed(seen.at_peak)}")
    print(
        f"{len(ratios)} plans: predicted / tracked from {min(ratios):.3f} to {max(ratios):.3f}, mean "
        f"{np.mean(ratios):.3f}"
    )


def kendall_tau(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Pairs in the same order less pairs in the other one, over all pairs whose measured times differ by more than
    NOISE."""
    pairs = [
        (i, j) for i, j in itertools.combinations(range(len(measured)), 2) if abs(measured[i] / measured[j] - 1) > NOISE
    ]
    same = sum(np.sign(predicted[i] - predicted[j]) * np.sign(measured[i] - measured[j]) for i, j in pairs)
    return float(same / max(len(pairs), 1))


def report(rows: list[Row]) -> None:
    columns = f"{'predicted ms':>13}{'by curves':>11}{'measured':>10}{'CPU':>8}{'MiB':>9}{'measured':>10}{'tracked':>9}"
    print(f"{'model':8}{'mesh':10}{'strategy':14}{columns}")
    for r in rows:
        seconds = (
            f"{r.predicted * 1e3:13.1f}{r.by_curves * 1e3:11.1f}{r.measured * 1e3:10.1f}{r.measured_cpu * 1e3:8.1f}"
        )
        bytes_ = f"{r.predicted_bytes / 2**20:9.1f}{r.measured_bytes / 2**20:10.1f}{r.tracked.peak_bytes / 2**20:9.1f}"
        print(f"{r.case.model:8}{r.case.mesh:10}{r.case.label:14}{seconds}{bytes_}")
    groups = {model: [r for r in rows if r.case.model == model] for model in MODELS} | {"both": rows}
    for name, against in itertools.product(("predicted", "by_curves"), ("measured", "measured_cpu")):
        pairs = {key: [(getattr(r, name), getattr(r, against)) for r in some] for key, some in groups.items()}
        taus = ", ".join(f"{key} {kendall_tau(*zip(*some)):.2f}" for key, some in pairs.items())
        error = np.mean([abs(a / b - 1) for a, b in pairs["both"]])
        factor = math.exp(np.mean([math.log(b / a) for a, b in pairs["both"]]))
        scaled = np.mean([abs(factor * a / b - 1) for a, b in pairs["both"]])
        errors = f"mean error {error:.0%}, {scaled:.0%} after a factor of {factor:.2f}"
        print(f"{name} against {against}: Kendall's tau {taus}; {errors}")
    for what, bytes_ in (
        ("measured", [r.measured_bytes for r in rows]),
        ("tracked", [r.tracked.peak_bytes for r in rows]),
    ):
        error = np.mean([abs(r.predicted_bytes / b - 1) for r, b in zip(rows, bytes_)])
        print(f"memory, predicted against {what}: mean error {error:.0%}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", metavar="FILE", help="a calibrated profile (default: calibrate now)")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4))
    parser.add_argument("--memory-only", action="store_true", help="predicted against tracked memory, for more plans")
    a = parser.parse_args()
    warnings.filterwarnings("ignore")
    if a.memory_only:
        profile = hardware.load(a.hardware or "cpu-gloo")
        plans = [(case, planned(case, profile)[0]) for case in MEMORY_CASES]
        report_memory(plans, tracked(plans))
        return 0
    if a.hardware:
        profile = hardware.load(a.hardware)
    else:
        measured = calibrate.measurements("gloo", a.ranks)
        profile = calibrate.to_profile(measured, hardware.load("cpu-gloo"), "here", calibrate.fingerprint("gloo"))
    timed = cases(a.ranks)
    rows = [predict(case, profile) for case in timed]
    with tempfile.TemporaryDirectory() as folder:
        for i, row in enumerate(rows):
            row.plan.save(f"{folder}/{i}.json")
        raced = gloo.run(a.ranks, race, timed, folder, a.rounds, seconds=1800)
        seconds = np.quantile(np.max(raced, axis=0), 0.25, axis=1)
        bytes_ = np.max(gloo.run(a.ranks, peaks, timed, folder, seconds=1800), axis=0)
    for row, (wall, cpu), most in zip(rows, seconds, bytes_):
        row.measured, row.measured_cpu, row.measured_bytes = float(wall), float(cpu), float(most)
    for row, seen in zip(rows, tracked([(row.case, row.plan) for row in rows], a.ranks)):
        row.tracked = seen
    report(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
