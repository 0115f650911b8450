"""Time and memory that planning takes on this machine, from the command's start to its end, capture included.

    OMP_NUM_THREADS=1 python benchmarks/plan_time.py [CASE ...]      CASE: MODEL:MESH:BATCH:SEQ[:MEMORY]

Each case is a process of its own. Prints a row a case: wall seconds, the process's largest resident memory, the proven gap.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

CASES = [
    "gpt2:dp=2,tp=2:8:1024",
    "llama3-8b/layers=4:dp=8,tp=8:16:8192",
    "llama3-8b:tp=8:1:8192",
    "llama3-8b:dp=8,tp=8:16:8192",
    "llama3-8b:dp=8,tp=8:16:8192:45GB",
    "llama3-8b:dp=8,tp=8:16:8192:25GB",
]


def planned(case: str, hardware: str, precision: str) -> tuple[float, float, dict] | str:
    """Seconds, GiB and the plan's JSON, or the last line that the command said."""
    model, mesh, batch, seq, *memory = case.split(":")
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "autopar.cli", "plan", "--model", model.replace("/", ":"), "--mesh", mesh,
                   "--batch", batch, "--seq", seq, "--hardware", hardware, "--precision", precision,
                   "--json", file.name]  # fmt: skip
        command += ["--memory", memory[0]] if memory else []
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        said = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - start
        if process.returncode:
            return (said.strip().splitlines() or ["no message"])[-1]
        return seconds, usage.ru_maxrss / 2**20, json.load(open(file.name))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=CASES)
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--precision", default="bf16")
    a = parser.parse_args()
    print(f"{'case':42} {'seconds':>8} {'GiB':>6} {'gap':>7} {'step ms':>9} {'GiB planned':>12}")
    failed = 0
    for case in a.cases:
        result = planned(case, a.hardware, a.precision)
        if isinstance(result, str):
            failed += 1
            print(f"{case:42} {result}")
            continue
        seconds, gib, plan = result
        print(f"{case:42} {seconds:8.1f} {gib:6.2f} {plan['gap']:7.2%} {plan['step_seconds'] * 1e3:9.1f} "
              f"{plan['peak_bytes'] / 2**30:12.1f}", flush=True)  # fmt: skip
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
