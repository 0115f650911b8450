"""Compare what a step takes as it is played with what its busiest streams need: flat, accumulated, in stages.

    OMP_NUM_THREADS=1 python benchmarks/one_clock.py [WORD ...]        the rows whose text has one of the words

The search bounds what the busiest streams need, so the first column of ratios is what its bound cannot see; the gap is
that of the plan. `experts`: the same ratio of the recipes' plans, the least and the most. A step in stages has no such
need: its ratio is that of one micro-batch on the mesh of a stage. All are bf16 with AdamW.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

LOW, HIGH = 0.98, 1.05  # what every ratio is meant to lie between


@dataclass(frozen=True)
class Row:
    model: str
    mesh: str
    batch: int
    seq: int
    hardware: str = "h100"
    options: dict = field(default_factory=dict)

    def __str__(self) -> str:
        said = " ".join(f"{name}={value:.3g}" if isinstance(value, float) else f"{name}={value}"
                        for name, value in self.options.items())  # fmt: skip
        return f"{self.model:13} {self.mesh:15} {self.batch:>5} x {self.seq:<5} {self.hardware:5} {said:28}"


GIB = 2.0**30
ROWS = [
    Row("gpt2", "a=8", 64, 1024),
    Row("gpt2", "a=8", 64, 1024, "a100"),
    Row("gpt2", "dp=16", 256, 1024),
    Row("gpt2", "dp=8", 256, 1024, options={"micro_batches": 4}),
    Row("llama3-8b", "dp=8", 16, 8192),
    Row("llama3-8b", "dp=64", 64, 8192),
    Row("llama3-8b", "dp=64", 64, 8192, "a100"),
    Row("llama3-8b", "dp=8,tp=8", 16, 8192),
    Row("llama3-8b", "dp=8,tp=8", 16, 8192, options={"memory": 40 * GIB}),
    Row("llama3-8b", "dp=8,tp=8", 16, 8192, options={"memory": 30 * GIB}),
    Row("llama3-8b", "dp=8,tp=8", 16, 8192, options={"memory": 20 * GIB}),
    Row("llama3-8b", "dp=8,tp=8", 64, 8192, options={"micro_batches": 4}),
    Row("llama3-8b", "dp=16,tp=4", 128, 4096, "a100", {"micro_batches": 4}),
    Row("mixtral-8x7b", "dp=8,tp=8", 128, 4096),
    Row("llama3-70b", "dp=32,tp=8", 256, 8192),
    Row("llama3-70b", "dp=32,tp=8", 256, 8192, options={"micro_batches": 4}),
    Row("gpt3-175b", "dp=128,tp=8", 1536, 2048, "a100"),
    Row("llama3-405b", "a=16,b=128,c=8", 2048, 8192),
    Row("gpt2", "pp=2,dp=4", 64, 1024),
    Row("llama3-8b", "pp=4,dp=2,tp=8", 64, 8192),
    Row("llama3-70b", "pp=8,dp=4,tp=8", 256, 4096, "a100"),
]


def ratio_of(outcome) -> float:
    """Return the seconds that a plan's pass takes as it is played over those that its busiest streams need."""
    return outcome.seconds / outcome.evaluation.seconds


def measured(row: Row) -> tuple[str, list[float]]:
    """The figures of a row as text, and its ratios."""
    from autopar import models
    from autopar.api import entry as api
    from autopar.planner.solver.search import Outcome

    model, inputs = models.build(row.model, batch=row.batch, seq=row.seq)
    start = time.process_time()
    planned = api.search(
        model, row.mesh, inputs, hardware=row.hardware, precision="bf16", execution="eager", **row.options
    )
    plan, seconds = planned.plan, time.process_time() - start
    ratio = ratio_of(planned.chosen)
    others = [ratio_of(one) for one in planned.others.values() if isinstance(one, Outcome)]
    experts = f"{min(others):.3f} to {max(others):.3f}" if others else "-"
    text = f"{plan.step_seconds * 1e3:9.1f} {ratio:6.3f} {experts:>15} {plan.gap:7.2%} {seconds:6.1f}"
    return text, [ratio, *others]


def main() -> int:
    from autopar.cli.common import quiet

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    words = parser.parse_args().words
    quiet()
    print(f"{'':70} {'step ms':>9} {'ratio':>6} {'experts':>15} {'gap':>7} {'CPU s':>6}")
    every = []
    for row in (row for row in ROWS if not words or any(word in str(row) for word in words)):
        text, ratios = measured(row)
        every += ratios[:1]
        print(f"{row} {text}", flush=True)
    within = sum(LOW <= ratio <= HIGH for ratio in every)
    print(f"{within} of {len(every)} plans between {LOW} and {HIGH}")
    return int(within < len(every))


if __name__ == "__main__":
    sys.exit(main())
