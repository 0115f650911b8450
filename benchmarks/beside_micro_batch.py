"""Steps of mixtures of experts in micro-batches without stages, one after the other and side by side, by the planner's
clock.

    OMP_NUM_THREADS=1 python benchmarks/beside_micro_batch.py [--only qwen3]

Models are those of benchmarks/moe_plans.py, in bf16, pointwise ops fused, on H100s without an axis of stages, one
sample of 4,096 tokens a replica and micro-batch. "apart" is the plan with pairs left out, the fastest that the search
finds for the memory; "rows" are the seconds of a step in which rows travel beside another micro-batch. CPU seconds are
of planning with pairs, and without, tracing included.
"""

from __future__ import annotations

import argparse
import time

import torch
from moe_plans import GIB, SEQ, mixtral, qwen3
from transformers import AutoModelForCausalLM, DeepseekV3Config

import autopar
from autopar.planner.spmd import plan as spmd
from autopar.utils.format import table

CASES = {
    "mixtral": ("Mixtral 8x22B", mixtral, "dp=8,ep=8,tp=4"),
    "qwen3": ("Qwen3-235B-A22B", qwen3, "dp=8,ep=32"),
    "deepseek": ("DeepSeek-V3", DeepseekV3Config, "dp=16,ep=64"),
}
MICRO_BATCHES = 4


def planned(config, mesh: str) -> tuple[autopar.Plan, float]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config())
    sizes = autopar.Mesh.parse(mesh).axis_sizes
    ids = torch.zeros(MICRO_BATCHES * sizes["dp"] * sizes["ep"], SEQ, dtype=torch.long, device="meta")
    cpu = time.process_time()
    plan = autopar.plan(
        model, mesh, {"input_ids": ids, "labels": ids}, hardware="h100", precision="bf16", execution="compiled",
        micro_batches=MICRO_BATCHES, baselines=False, fixes=False,
    )  # fmt: skip
    return plan, time.process_time() - cpu


def row(name: str, config, mesh: str) -> list[str]:
    plan, cpu = planned(config, mesh)
    pairs = spmd.with_pairs
    spmd.with_pairs = lambda chosen, *others: chosen
    try:
        apart, cpu_apart = planned(config, mesh)
    finally:
        spmd.with_pairs = pairs
    rows = f"{plan.pipeline.pairs.beside_seconds:.3f}" if plan.pipeline.pairs else "-"
    return [
        name, mesh, f"{apart.step_seconds:.3f}", f"{plan.step_seconds:.3f}",
        f"{1 - plan.step_seconds / apart.step_seconds:.1%}", rows, f"{apart.peak_bytes / GIB:.1f}",
        f"{plan.peak_bytes / GIB:.1f}", f"{cpu_apart:.0f}", f"{cpu:.0f}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=CASES, help="one of the models")
    args = parser.parse_args()
    rows = [row(*CASES[name]) for name in ([args.only] if args.only else CASES)]
    header = [
        "model",
        "mesh",
        "apart s",
        "pairs s",
        "saved",
        "rows s",
        "apart GiB",
        "pairs GiB",
        "apart CPU s",
        "CPU s",
    ]
    print("\n".join(table(header, rows, left=2)))


if __name__ == "__main__":
    main()
