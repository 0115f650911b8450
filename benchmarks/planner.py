"""Measure what planning takes here and what it finds: real models and meshes, capture included, a process a case.

    OMP_NUM_THREADS=1 python benchmarks/planner.py [WORD ...]         the cases whose name or mesh has one of the words
    OMP_NUM_THREADS=1 python benchmarks/planner.py --growth           seconds by number of layers and of devices
    OMP_NUM_THREADS=1 python benchmarks/planner.py --determinism 5    each case under 5 hash seeds, plans compared
    OMP_NUM_THREADS=1 python benchmarks/planner.py --case MODEL MESH BATCH SEQ

All are bf16 with AdamW on H100s with 80e9 bytes. Seconds are CPU seconds of a fresh process: importing torch and
autopar, capturing the joint graph, planning with all expert strategies beside; `all` has the building of the model too.
`margin`: how much longer the best expert plan that fits takes. `IPs`: integer programs solved, for the experts too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

BERT_LARGE = {  # Devlin et al., arXiv 1810.04805, section 3, and the config.json of the released uncased model
    "model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 1024, "num_hidden_layers": 24,
    "num_attention_heads": 16, "intermediate_size": 4096, "vocab_size": 30522, "max_position_embeddings": 512,
}  # fmt: skip
DESCRIBED = {"bert-large": BERT_LARGE}  # models of transformers, by their config.json


@dataclass(frozen=True)
class Case:
    """A registry model or one of DESCRIBED, with the global batch."""

    model: str
    mesh: str
    batch: int
    seq: int

    def __str__(self) -> str:
        return f"{self.model:14} {self.mesh:15} {self.batch:>5} x {self.seq:<6}"


CASES = [
    Case("gpt2", "a=8", 64, 1024),
    Case("bert-large", "a=8", 256, 512),
    Case("vit-l", "a=8", 1024, 1),
    Case("resnet-50", "a=8", 2048, 1),
    Case("llama3-8b", "dp=8,tp=8", 16, 8192),
    Case("mixtral-8x7b", "dp=8,tp=8", 128, 4096),
    Case("llama3-70b", "dp=8,tp=8", 64, 8192),
    Case("llama3-70b", "dp=32,tp=8", 256, 8192),
    Case("gpt3-175b", "a=16,b=8,c=8", 1536, 2048),
    Case("llama3-405b", "a=16,b=128,c=8", 2048, 8192),
]
LAYERS = [8, 16, 32, 64, 96]
GROWING = [Case(f"gpt:hidden=4096,heads=32,vocab=50257,seq=2048,layers={n}", "dp=8,tp=8", 64, 2048) for n in LAYERS]
DEVICES = [64, 256, 1024, 4096, 16384]
WIDENING = [Case("llama3-8b", f"dp={n // 8},tp=8", n // 4, 8192) for n in DEVICES]
HEAD = (
    f"{'model':14} {'mesh':15} {'batch x seq':>14} | {'import':>6} {'capture':>7} {'plan':>6} {'all s':>6} {'GiB':>5} "
    f"| {'gap':>6} {'step ms':>9} {'GiB':>5} {'best expert':>17} {'margin':>7} {'IPs':>4}"
)


@dataclass(frozen=True)
class Measured:
    """CPU seconds and resident GiB of the process that planned, and what it found. `hash`: of the plan's JSON."""

    import_seconds: float
    capture_seconds: float
    plan_seconds: float
    seconds: float
    resident_gib: float
    gap: float
    step_seconds: float
    planned_gib: float
    expert: str
    expert_seconds: float
    hash: str
    programs: int  # that were solved, those of the expert plans included

    def __str__(self) -> str:
        margin = f"{self.expert_seconds / self.step_seconds - 1:7.1%}" if self.expert else f"{'':>7}"
        return (
            f"{self.import_seconds:6.1f} {self.capture_seconds:7.1f} {self.plan_seconds:6.1f} {self.seconds:6.1f} "
            f"{self.resident_gib:5.2f} | {self.gap:6.2%} {self.step_seconds * 1e3:9.1f} {self.planned_gib:5.1f} "
            f"{self.expert or 'none fits':>17} {margin} {self.programs:4}"
        )


def plan_here(case: Case) -> Measured:
    """Plans in this process, which has imported neither torch nor autopar yet."""
    import resource

    start = time.process_time()
    from autopar import models
    from autopar.api import entry as api
    from autopar.cli.common import quiet
    from autopar.planner.solver.ilp import Program

    imported, begun = time.process_time(), {}
    quiet()
    solve, solved = Program.solve, []
    Program.solve = lambda self, *args, **options: solved.append(self.variables) or solve(self, *args, **options)
    with tempfile.TemporaryDirectory() as folder:
        text = case.model
        if text in DESCRIBED:
            (Path(folder) / "config.json").write_text(json.dumps(DESCRIBED[text]))
            text = f"hf:{folder}"
        model, inputs = models.build(text, batch=case.batch, seq=case.seq)
    planned = api.search(model, case.mesh, inputs, hardware="h100", memory=80e9, precision="bf16",
                         execution="eager", name=case.model,
                         report=lambda text: begun.setdefault(text, time.process_time()))  # fmt: skip
    plan = planned.plan
    done = time.process_time()
    experts = {a.name: a.step_seconds for a in plan.alternatives if a.fits and a.step_seconds}
    expert = min(experts, key=experts.get, default="")
    captured = begun["building the problem"]
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
    return Measured(
        imported - start, captured - begun["tracing the model"], done - captured, done - start, resident, plan.gap,
        plan.step_seconds, plan.peak_bytes / 2**30, expert, experts.get(expert, 0.0), plan.hash, len(solved),
    )  # fmt: skip


def measured(case: Case, seconds_limit: float, hash_seed: str = "0") -> Measured | str:
    """A case in a process of its own, or why there is no number."""
    command = [sys.executable, __file__, "--here", *(str(value) for value in asdict(case).values())]
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds_limit)
    except subprocess.TimeoutExpired:
        return f"stopped after {seconds_limit:.0f} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no message"])[-1]
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def table(cases: Iterable[Case], seconds_limit: float) -> int:
    """Prints a row a case and returns how many failed."""
    print(HEAD, flush=True)
    failed = 0
    for case in cases:
        result = measured(case, seconds_limit)
        failed += isinstance(result, str)
        print(f"{case} | {result}", flush=True)
    return failed


def growth(name: str, cases: list[Case], sizes: list, seconds_limit: float) -> int:
    """Prints seconds by size; the last line is what the largest takes as a multiple of the smallest."""
    print(f"\n{cases[0]}", flush=True)
    print(f"{name:>16} {'capture s':>10} {'plan s':>8} {'GiB':>6} {'gap':>7} {'step ms':>9}")
    found = []
    for size, case in zip(sizes, cases):
        result = measured(case, seconds_limit)
        if isinstance(result, str):
            print(f"{size:>16} {result}", flush=True)
            continue
        found.append(result)
        print(f"{size:>16} {result.capture_seconds:10.1f} {result.plan_seconds:8.1f} {result.resident_gib:6.2f} "
              f"{result.gap:7.2%} {result.step_seconds * 1e3:9.1f}", flush=True)  # fmt: skip
    if found:
        fields = ("capture_seconds", "plan_seconds", "resident_gib")
        capture, plan, resident = (getattr(found[-1], field) / getattr(found[0], field) for field in fields)
        print(f"{'last to first':>16} {capture:9.2f}x {plan:7.2f}x {resident:5.2f}x", flush=True)
    return len(cases) - len(found)


def determinism(cases: Iterable[Case], runs: int, seconds_limit: float) -> int:
    """Prints whether all runs of a case gave the same plan, and returns how many cases did not."""
    differing = 0
    for case in cases:
        results = [measured(case, seconds_limit, str(seed)) for seed in range(1, runs + 1)]
        hashes = {r if isinstance(r, str) else r.hash for r in results}
        same = len(hashes) == 1 and not isinstance(results[0], str)
        differing += not same
        print(
            f"{case} | {runs} runs: {'one plan' if same else f'{len(hashes)} plans'}, {', '.join(sorted(hashes))}",
            flush=True,
        )
    return differing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD", help="only the cases whose name or mesh has one of them")
    parser.add_argument("--case", nargs=4, action="append", default=[], metavar=("MODEL", "MESH", "BATCH", "SEQ"))
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--determinism", type=int, metavar="N")
    parser.add_argument("--seconds", type=float, default=1200.0, help="limit for one case (default 1200)")
    parser.add_argument("--here", nargs=4, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.here:
        print(json.dumps(asdict(plan_here(case_of(*a.here)))))
        return 0
    cases = [case_of(*words) for words in a.case]
    cases = cases or [c for c in CASES if not a.words or any(word in str(c) for word in a.words)]
    if a.growth:
        failed = growth("layers", GROWING, LAYERS, a.seconds) + growth("devices", WIDENING, DEVICES, a.seconds)
    elif a.determinism:
        failed = determinism(cases, a.determinism, a.seconds)
    else:
        failed = table(cases, a.seconds)
    return int(failed > 0)


def case_of(model: str, mesh: str, batch: str, seq: str) -> Case:
    return Case(model, mesh, int(batch), int(seq))


if __name__ == "__main__":
    sys.exit(main())
