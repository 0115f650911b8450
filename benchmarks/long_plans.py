"""Plans of the longest sequences that others publish: what a step takes, holds, and how long it takes to plan.

    OMP_NUM_THREADS=1 python benchmarks/long_plans.py [--only WORD] > benchmarks/results/long_plans.txt

Llama-3-8B trains on one row of tokens, in bf16 with AdamW, on H100 of 74.5 GiB: ALST (arXiv 2506.13996) states 500
thousand tokens on one, 3.7 million on 8 and 15 million on 32, with parameters, optimizer state and activations on the
host. Llama-3-405B has the mesh of arXiv 2407.21783, table 4: 16,384 H100, tensor 8, context 16, pipeline 16, data 8,
sequences of 131,072, 16 M tokens a step, 380 TFLOP/s and an MFU of 38 % as measured there. Each case is a process of
its own; seconds to plan are from the model on the meta device to the plan, tracing included. Nothing is run on such
devices.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import autopar
from autopar.errors import MemoryInfeasibleError
from autopar.models import build

GIB = 2**30
COLUMNS = ("model", "tokens", "devices", "mesh", "options", "attention", "step s", "MFU", "peak GiB", "wall s", "CPU s")


@dataclass(frozen=True)
class Case:
    """A model on a row of so many tokens, and the arguments of `autopar.plan`."""

    model: str
    tokens: int
    mesh: str
    batch: int = 1
    options: dict[str, object] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        return autopar.Mesh.parse(self.mesh).devices


HOST: dict[str, object] = {"offload": "auto"}
CASES = [
    Case("llama3-8b", 400_000, "cp=1", options=HOST),
    Case("llama3-8b", 500_000, "cp=1", options=HOST),
    Case("llama3-8b", 500_000, "cp=8"),
    Case("llama3-8b", 3_700_000, "cp=8", options=HOST),
    Case("llama3-8b", 15_000_000, "cp=4,up=8", options=HOST | {"strategy": "ring+ulysses+fsdp"}),
    Case("llama3-405b", 131_072, "pp=16,dp=8,cp=16,tp=8", batch=128,
         options={"strategy": "all_gather_kv+megatron_sp", "micro_batches": 16}),
]  # fmt: skip


def planned(case: Case) -> dict[str, object]:
    """Return the figures of a case, of a refused one what is missing."""
    walls, cpu = time.perf_counter(), time.process_time()
    model, inputs = build(f"{case.model}:seq={case.tokens}", batch=case.batch, seq=case.tokens, device="meta")
    try:
        plan = autopar.plan(model, case.mesh, inputs, hardware="h100", precision="bf16", execution="eager",
                            baselines=False, fixes=False, **case.options)  # fmt: skip
        schemes = Counter(one.scheme for one in plan.attentions)
        found = {"step": f"{plan.step_seconds:.1f}", "mfu": f"{plan.utilization:.1%}",
                 "peak": f"{plan.peak_bytes / GIB:.1f}", "attention": ", ".join(schemes) or "whole",
                 "text": str(plan)}  # fmt: skip
    except MemoryInfeasibleError as error:
        found = {"step": "-", "mfu": "-", "peak": f"{error.missing_bytes / GIB:.1f} missing", "attention": "-",
                 "text": str(error)}  # fmt: skip
    return found | {"wall": time.perf_counter() - walls, "cpu": time.process_time() - cpu}


def row(case: Case, found: dict) -> list[str]:
    options = " ".join(f"{name}={value}" for name, value in case.options.items()) or "-"
    return [case.model, f"{case.tokens:,}", str(case.devices), case.mesh, options, found["attention"], found["step"],
            found["mfu"], found["peak"], f"{found['wall']:.0f}", f"{found['cpu']:.0f}"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases of which a line would have this word")
    parser.add_argument("--case", type=int, help="one case, as JSON")
    parser.add_argument("--text", action="store_true", help="plans and refusals as text, too")
    a = parser.parse_args()
    if a.case is not None:
        print(json.dumps(planned(CASES[a.case])))
        return
    rows = [list(COLUMNS)]
    for i, case in enumerate(CASES):
        if a.only in f"{case.model} {case.tokens} {case.mesh}":
            made = subprocess.run([sys.executable, __file__, "--case", str(i)], check=True, capture_output=True)
            found = json.loads(made.stdout.decode().splitlines()[-1])
            rows.append(row(case, found))
            print("  ".join(rows[-1]), *([found["text"]] if a.text else []), sep="\n", file=sys.stderr, flush=True)
    widths = [max(map(len, column)) for column in zip(*rows)]
    for cells in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip())


if __name__ == "__main__":
    main()
