"""Plan under less and less memory: what a step takes, and whether less memory ever gives a faster plan.

    OMP_NUM_THREADS=1 python benchmarks/limits.py [WORD ...] [--limits 8]      rows whose text has one of the words

Limits are shares of what the fastest plan of all holds, evenly from all of it down to the least that a plan fits, as
bisection finds it. `needs`: what the plan holds, as a share of the same. `faster`: by how much a plan under a smaller
limit is faster, which never should be: it would fit under this limit too. All in bf16, with AdamW.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from autopar import models
from autopar.api import entry as api
from autopar.errors import MemoryInfeasibleError

SHARPNESS = 0.03  # of the fastest plan's bytes, to which the least limit is found
SAME = 1e-9


@dataclass(frozen=True)
class Row:
    """A model and a mesh, with the global batch."""

    model: str
    mesh: str
    batch: int
    seq: int
    hardware: str = "h100"

    def __str__(self) -> str:
        return f"{self.model} {self.mesh} {self.batch} x {self.seq} {self.hardware}"


@dataclass(frozen=True)
class Planned:
    """A plan under a limit: what it takes and holds; its gap to the bound, as a share."""

    seconds: float
    peak_bytes: float
    gap: float
    cpu_seconds: float


ROWS = [
    Row("gpt2", "a=8", 64, 1024),
    Row("gpt2", "pp=4,tp=2", 64, 1024),
    Row("vit-l", "a=8", 1024, 1),
    Row("llama3-8b", "dp=8,tp=8", 16, 8192),
    Row("llama3-8b", "pp=4,dp=2,tp=8", 128, 4096),
    Row("gpt:hidden=256,layers=8,heads=8,vocab=8192,seq=1024", "pp=4,dp=2", 64, 1024, "a100"),
    Row("llama:hidden=2048,layers=8,heads=16,kv_heads=8,ffn=5632,vocab=32000,seq=2048", "pp=2,dp=4", 64, 2048),
    Row("mixtral-8x7b", "dp=8,tp=8", 128, 4096),
    Row("mixtral-8x7b", "pp=4,dp=8", 128, 4096),
]


def planned(row: Row, limit_bytes: float | None) -> Planned | None:
    """Return the plan of a row under a limit, None if it is refused."""
    model, inputs = models.build(row.model, batch=row.batch, seq=row.seq)
    start = time.process_time()
    try:
        plan = api.search(model, row.mesh, inputs, hardware=row.hardware, precision="bf16", execution="eager",
                          memory=limit_bytes,
                          baselines=False, fixes=False).plan  # fmt: skip
    except MemoryInfeasibleError:
        return None
    spent = time.process_time() - start
    return Planned(plan.step_seconds, plan.peak_bytes, plan.gap, spent)


def least_share(row: Row, most_bytes: float) -> float:
    """Return the least share of some bytes, to SHARPNESS, under which there is a plan."""
    low, high = 0.0, 1.0
    while high - low > SHARPNESS:
        middle = (low + high) / 2
        low, high = (middle, high) if planned(row, middle * most_bytes) is None else (low, middle)
    return high


def scanned(row: Row, count: int) -> tuple[int, int]:
    """Print the plans of a row, and return under how many limits and of how many a smaller limit gives a faster one."""
    free = planned(row, None)
    assert free is not None, f"{row} does not fit its device"
    least = least_share(row, free.peak_bytes)
    shares = [1.0 - (1.0 - least) * i / (count - 1) for i in range(count)]
    found = [planned(row, share * free.peak_bytes) for share in shares]
    print(f"{row}: {free.seconds * 1e3:.1f} ms in {free.peak_bytes / 2**30:.1f} GiB without a limit")
    print(f"    {'limit':>6} {'step ms':>9} {'needs':>6} {'gap':>6} {'CPU s':>6} {'faster':>7}")
    slower = 0
    for i, (share, one) in enumerate(zip(shares, found)):
        if one is None:
            slower += 1
            print(f"    {share:6.1%}   refused, although a smaller limit is not")
            continue
        faster = max((1.0 - other.seconds / one.seconds for other in found[i + 1 :] if other is not None), default=0.0)
        slower += faster > SAME
        print(f"    {share:6.1%} {one.seconds * 1e3:9.1f} {one.peak_bytes / free.peak_bytes:6.1%} {one.gap:6.2%} "
              f"{one.cpu_seconds:6.1f} {f'{faster:.2%}' if faster > SAME else '-':>7}", flush=True)  # fmt: skip
    return slower, count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--limits", type=int, default=8, help="limits of a row (default 8)")
    a = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = [row for row in ROWS if not a.words or any(word in str(row) for word in a.words)]
    results = [scanned(row, a.limits) for row in rows]
    slower, limits = (sum(column) for column in zip(*results))
    print(f"\n{limits} limits, {slower} with a plan that is slower than that of a smaller one")
    return int(slower > 0)


if __name__ == "__main__":
    sys.exit(main())
