"""Damaged plan files and bad inputs by the thousand: a typed error or a right result, never anything else.

    OMP_NUM_THREADS=1 python benchmarks/fuzz.py --plans 10000 --inputs 2000 [--seed 0]

A plan file that still loads and fits is simulated on all ranks and compared with the unsharded graph.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from autopar import models
from autopar.simulate.oracle import global_values
from autopar.simulate.step import plan_and_capture
from tests.fuzz import bad_inputs, plan_files

PLANS = (
    ("mlp:hidden=16,layers=2", "dp=2,tp=2", "megatron_sp"), ("mlp:hidden=16,layers=2", "dp=4", "fsdp"),
    ("gpt:hidden=12,layers=1,heads=2,vocab=10,seq=4", "dp=2,tp=2", None),
    ("mlp:hidden=15,layers=1", "tp=3", "megatron"),
)  # fmt: skip


def plans(count: int, seed: int) -> int:
    wrong = 0
    for number, (text, mesh, strategy) in enumerate(PLANS):
        model, inputs = models.build(text, batch=4, seq=4, device="cpu", seed=0)
        options = dict(hardware="cpu-gloo", baselines=False, strategy=strategy)
        plan, captured = plan_and_capture(model, mesh, inputs, **options)
        values = global_values(captured, model, inputs)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "plan.json"
            report = plan_files.run(plan, captured, values, count // len(PLANS), path, seed + number)
        outcomes = ", ".join(f"{n} {kind}" for kind, n in sorted(report.outcomes.items()))
        print(f"{text} on {mesh}: {outcomes}; {report.simulated} simulated, slowest {report.slowest_seconds:.1f} s "
              f"({report.slowest}), {len(report.wrong)} wrong",
              flush=True)  # fmt: skip
        print("".join(f"  {line}\n" for line in report.wrong[:20]), end="", flush=True)
        wrong += len(report.wrong)
    return wrong


def inputs(count: int, seed: int) -> int:
    report = bad_inputs.run(count, seed)
    print(f"{count} bad inputs: {', '.join(f'{n} {kind}' for kind, n in sorted(report.outcomes.items()))}; "
          f"slowest {report.slowest_seconds:.1f} s ({report.slowest}), {len(report.wrong)} wrong")  # fmt: skip
    print("".join(f"  {line}\n" for line in report.wrong[:60]), end="", flush=True)
    return len(report.wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plans", type=int, default=400)
    parser.add_argument("--inputs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    return min(1, plans(args.plans, args.seed) + inputs(args.inputs, args.seed))


if __name__ == "__main__":
    sys.exit(main())
