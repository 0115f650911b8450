"""Rows of few samples through the stages of a pipeline, whole and in chunks of their tokens.

    OMP_NUM_THREADS=1 python benchmarks/sequence_chunks.py > benchmarks/results/sequence_chunks.txt

Plans: seconds of a step, idle share and the fullest device's memory with whole rows (`sequence_chunks=1`) and with what
the planner takes (None), at the same mesh; nothing is run on such devices. Measured: the wall time of a step of two
gloo processes, pp=2, one row of tokens, with 1 to 16 chunks, losses compared; what the plan says of the idle share, and
of memory against the tracker's. `--plans` and `--measure` do one of the two.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist

import autopar
from autopar.models import build
from tests.helpers import gloo
from tests.helpers.allocations import training_step
from tests.runtime.parity import device_mesh

GIB = 2**30
CASES = [  # model, rows, tokens, mesh
    ("llama3-8b", 1, 131_072, "pp=4,tp=2"),
    ("llama3-8b", 1, 524_288, "pp=8,tp=8"),
    ("llama3-8b", 8, 32_768, "pp=8,dp=8"),
    ("llama3-70b", 1, 131_072, "pp=8,tp=8"),
    ("llama3-70b", 4, 131_072, "pp=8,cp=4,tp=8"),
    ("llama3-70b", 64, 8_192, "pp=8,tp=8"),
]
MEASURED = "llama:hidden=256,layers=8,heads=4,kv_heads=2,ffn=512,vocab=512,seq={tokens}"
STEPS = 5


def plans() -> None:
    print(f"{'model':<12} {'rows x tokens':>15} {'mesh':<16} {'chunks':>6} {'micro-batches':>13} {'schedule':<24} "
          f"{'step s':>8} {'idle':>6} {'peak GiB':>8} {'CPU s':>6}")  # fmt: skip
    for name, rows, tokens, mesh in CASES:
        for chunks in (1, None):
            model, inputs = build(f"{name}:seq={tokens}", batch=rows, seq=tokens)
            start = time.process_time()
            plan = autopar.plan(
                model,
                mesh,
                inputs,
                hardware="h100",
                memory="80GB",
                baselines=False,
                fixes=False,
                sequence_chunks=chunks,
            )
            p, seconds = plan.pipeline, time.process_time() - start
            print(f"{name:<12} {f'{rows} x {tokens:,}':>15} {mesh:<16} {p.row_chunks:>6} {p.micro_batches:>13} "
                  f"{p.schedule:<24} {plan.step_seconds:>8.3f} {p.played().bubble:>6.1%} "
                  f"{plan.peak_bytes / GIB:>8.2f} {seconds:>6.1f}", flush=True)  # fmt: skip


def _measured(rank: int, tokens: int, counts: list[int]) -> list[tuple[float, float, float, float]]:
    """(step wall s, planned idle share, tracked bytes over planned, loss) of each number of chunks, in turns."""
    model, inputs = build(MEASURED.format(tokens=tokens), batch=1, seq=tokens, device="cpu")
    state, modules = {k: v.clone() for k, v in model.state_dict().items()}, []
    for count in counts:
        other, _ = build(MEASURED.format(tokens=tokens), batch=1, seq=tokens, device="cpu")
        other.load_state_dict(state)
        modules.append(
            autopar.compile(other, device_mesh("pp=2"), inputs, sequence_chunks=count, micro_batches=1, schedule="1f1b")
        )
    seconds: list[list[float]] = [[] for _ in counts]
    losses = [0.0] * len(counts)
    for _ in range(STEPS + 1):
        for i, module in enumerate(modules):
            dist.barrier()
            start = time.perf_counter()
            loss = module(**inputs).loss
            loss.backward()
            module.zero_grad()
            dist.barrier()
            seconds[i].append(time.perf_counter() - start)
            losses[i] = float(loss)
    shares = []
    for module in modules:
        seen = training_step(module, inputs, torch.optim.SGD(module.parameters(), lr=0.0), steps=1)
        pipeline = module.plan.pipeline
        shares.append(seen.peak_bytes / pipeline.costs[rank].peak_bytes)
    idle = [module.plan.pipeline.played().bubble for module in modules]
    return [*zip([statistics.median(s[1:]) for s in seconds], idle, shares, losses)]


def measure() -> None:
    print(f"\n{'tokens':>7} {'chunks':>6} {'step wall s':>11} {'of whole rows':>13} {'idle planned':>12} "
          f"{'tracked / planned':>18} {'loss':>10}")  # fmt: skip
    for tokens in (1_024, 4_096):
        counts = [1, 2, 4, 8, 16]
        each = gloo.run(2, _measured, tokens, counts, seconds=3_000)
        for i, count in enumerate(counts):
            wall, idle, _, _ = each[0][i]
            memory = " ".join(f"{ranks[i][2]:.2f}" for ranks in each)
            print(f"{tokens:>7,} {count:>6} {wall:>11.3f} {wall / each[0][0][0]:>13.2f} {idle:>12.1%} {memory:>18} "
                  f"{each[0][i][3]:>10.6f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", action="store_true", help="plan alone")
    parser.add_argument("--measure", action="store_true", help="measure alone")
    asked = parser.parse_args()
    if asked.plans or not asked.measure:
        plans()
    if asked.measure or not asked.plans:
        measure()
