"""Equal plans from equal input: `autopar plan ... --json -` in 20 processes, each with its own PYTHONHASHSEED.

    OMP_NUM_THREADS=1 python benchmarks/determinism.py [--processes 20] [--at-once 2] [--json FILE]

What the processes print has to be equal byte for byte. The cases take different ways through the planner: a free plan
beside all expert strategies, one short of memory that recomputes and accumulates gradients, a search over meshes, and a
refusal with what would fit instead. Of a case with different outputs the first line that differs is printed. Exit code
1 if there is one.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from autopar.utils.format import table

ROOT = Path(__file__).parent.parent
CASES = {
    "free": "--model gpt2-tiny --mesh dp=2,tp=2 --batch 8 --seq 64",
    "short of memory": "--model llama-tiny --mesh dp=2,tp=2 --batch 16 --seq 64 --micro-batches 2 --memory 2.3MiB "
    "--precision bf16",
    "meshes": "--model moe-tiny --devices 4 --batch 8 --seq 32 --no-baselines",
    "refused": "--model llama-tiny --mesh dp=2,tp=2 --batch 16 --seq 64 --strategy zero1 --memory 2MiB --no-baselines",
}


def output(words: str, seed: int) -> tuple[bytes, float]:
    """Return what one process prints, on stdout and stderr, and its seconds."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "autopar.cli", "plan", *words.split(), "--json", "-"], cwd=ROOT,
        stderr=subprocess.STDOUT, stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONHASHSEED": str(seed), "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    return done.stdout, time.perf_counter() - start


def first_difference(one: bytes, other: bytes) -> str:
    lines = itertools.zip_longest(one.decode().splitlines(), other.decode().splitlines(), fillvalue="nothing")
    return next(f"line {i}: {a.strip()} | {b.strip()}" for i, (a, b) in enumerate(lines, 1) if a != b)


def measured(name: str, processes: int, at_once: int) -> dict:
    with ThreadPoolExecutor(at_once) as pool:
        outputs, seconds = zip(*pool.map(lambda seed: output(CASES[name], seed), range(1, processes + 1)))
    distinct = sorted(set(outputs), key=outputs.index)
    return {
        "case": name, "arguments": CASES[name], "processes": processes, "distinct": len(distinct),
        "bytes": len(outputs[0]), "sha256": hashlib.sha256(outputs[0]).hexdigest(),
        "median_seconds": sorted(seconds)[processes // 2],
        "differs": first_difference(*distinct[:2]) if len(distinct) > 1 else "",
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    rows = []
    for name in args.cases:
        rows.append(measured(name, args.processes, args.at_once))
        print(f"{name}: {CASES[name]}", rows[-1]["differs"], flush=True)
    cells = [[r["case"], str(r["processes"]), str(r["distinct"]), str(r["bytes"]), r["sha256"][:12],
              f"{r['median_seconds']:.1f}"]
             for r in rows]  # fmt: skip
    print("", *table(["case", "processes", "distinct", "bytes", "sha256", "s a process"], cells), sep="\n")
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(r["distinct"] > 1 for r in rows))


if __name__ == "__main__":
    sys.exit(main())
