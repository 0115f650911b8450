"""The largest plans with everything free, and what the configurations that were published for the same models would
cost.

    OMP_NUM_THREADS=1 python benchmarks/planner_free.py [WORD ...] > benchmarks/results/planner_free.txt

For each case a fresh process runs `autopar plan --devices N`: stages or none, the mesh, micro-batches, the schedule,
cuts and what is computed again are chosen. The same is planned for the published mesh with the rest free, which the
free plan should not be slower than, and `autopar estimate` costs the published configuration. Seconds of a step are
those of the same clock for all; parts are of a mean device. Nothing was run on such devices.

gpt3-175b    Narayanan et al., arXiv 2104.04473: 1024 A100, batch 1536, sequences of 2048, tensor 8, pipeline 8, data
             16, full recomputation; the number of stages a rank is not given, so several are costed.
             github.com/NVIDIA/Megatron-LM, README of 2021: 32 s a step.
llama3-405b  Grattafiori et al., arXiv 2407.21783, table 4: 16,384 H100, 16 M tokens, sequences of 8192, tensor 8,
             pipeline 16, data 128, 41 % of the peak; interleaved, optimizer state and gradients sharded over the
             replicas.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from autopar.utils.format import table


@dataclass(frozen=True)
class Case:
    """`published`: arguments of `autopar estimate`, by name."""

    model: str
    devices: int
    batch: int
    seq: int
    hardware: str
    published: dict[str, str]

    @property
    def arguments(self) -> list[str]:
        return ["--model", self.model, "--batch", str(self.batch), "--seq", str(self.seq), "--hardware", self.hardware,
                "--precision", "bf16"]  # fmt: skip


MEGATRON = "--mesh pp=8,dp=16,tp=8 --strategy megatron --recompute full --micro-batch 1"
META = "--mesh pp=16,dp=128,tp=8 --strategy megatron_sp+zero1 --recompute none --micro-batch 1"
CASES = [
    Case("gpt3-175b", 1024, 1536, 2048, "a100", {
        "Megatron, 1F1B": f"{MEGATRON} --schedule 1f1b",
        "Megatron, 2 stages a rank": f"{MEGATRON} --schedule interleaved_1f1b --stages-per-rank 2",
        "Megatron, 6 stages a rank": f"{MEGATRON} --schedule interleaved_1f1b --stages-per-rank 6",
    }),
    Case("llama3-405b", 16384, 2048, 8192, "h100", {
        "Llama 3, 1F1B": f"{META} --schedule 1f1b",
        "Llama 3, 4 stages a rank": f"{META} --schedule interleaved_1f1b --stages-per-rank 4",
    }),
]  # fmt: skip


def run(command: str, case: Case, *arguments: str) -> tuple[dict, float, float, float]:
    """Return what the command says as JSON, its wall seconds, CPU seconds, and the largest resident GiB of any command
    so far."""
    with tempfile.TemporaryDirectory() as folder:
        file, before = Path(folder) / "out.json", resource.getrusage(resource.RUSAGE_CHILDREN)
        start = time.perf_counter()
        subprocess.run(["autopar", command, *case.arguments, *arguments, "--json", str(file)], check=True,
                       stdout=subprocess.DEVNULL, timeout=1800)  # fmt: skip
        wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return json.loads(file.read_text()), wall, cpu, after.ru_maxrss / 2**20


def row(name: str, found: dict, wall: float) -> tuple[str, ...]:
    pipeline, peak = found["pipeline"], found["peak_bytes"]
    how = f"{pipeline['schedule']}, {pipeline['micro_batches']} micro-batches" if pipeline else "no stages"
    if pipeline and pipeline["stages_per_rank"] > 1:
        how += f", {pipeline['stages_per_rank']} stages a rank"
    mesh = found["mesh"]
    if not isinstance(mesh, str):
        mesh = ",".join(f"{axis}={size}" for axis, size in mesh.items()) if isinstance(mesh, dict) else str(mesh)
    parts = (found[f"{part}_seconds"] for part in ("step", "compute", "communication", "recompute"))
    gib, limit = peak / 2**30, found["memory_limit_bytes"] / 2**30
    return (
        name,
        mesh,
        how,
        *(f"{seconds:.2f}" for seconds in parts),
        f"{gib:.1f}" + (" !" if gib > limit else ""),
        f"{wall:.0f}",
    )


def main() -> None:
    for case in CASES:
        if len(sys.argv) > 1 and not any(word in case.model for word in sys.argv[1:]):
            continue
        plan, wall, cpu, gib = run("plan", case, "--devices", str(case.devices), "--no-baselines")
        print(f"\n{case.model} on {case.devices} {case.hardware}, batch {case.batch}, sequences of {case.seq}")
        print(f"planned in {wall:.1f} s ({cpu:.1f} CPU s), at most {gib:.2f} GiB\n")
        rows = [row("autopar, all free", plan, wall)]
        for mesh in dict.fromkeys(arguments.split()[1] for arguments in case.published.values()):
            found, wall, _, _ = run("plan", case, "--mesh", mesh, "--no-baselines")
            rows.append(row("published mesh, the rest free", found, wall))
            print(f"all free by that: {plan['step_seconds'] / found['step_seconds']:.3f} of its step\n")
        for name, arguments in case.published.items():
            found, wall, _, _ = run("estimate", case, *arguments.split())
            rows.append(row(name, found, wall))
        head = ["configuration", "mesh", "", "step s", "compute", "comm", "again", "GiB", "planning s"]
        print("\n".join(table(head, rows)))
        print("\nmeshes tried                        at least s   step s    GiB")
        for tried in plan["meshes"]:
            step = f"{tried['step_seconds']:8.2f}" if tried["step_seconds"] else "       -"
            peak = f"{tried['peak_bytes'] / 2**30:6.1f}" if tried["peak_bytes"] else "     -"
            print(f"{tried['mesh']:32} {tried['bound']:13.2f} {step} {peak}  {tried['note']}", flush=True)


if __name__ == "__main__":
    main()
