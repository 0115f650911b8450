"""What copies of hot experts gain under uneven routing: planned steps of large models, and steps of two gloo processes.

    OMP_NUM_THREADS=1 python benchmarks/hot_experts.py [--only mixtral] >> benchmarks/results/hot_experts.txt
    OMP_NUM_THREADS=1 python benchmarks/hot_experts.py --measure

Plans are those of benchmarks/moe_plans.py with nothing asked for, for loads of the busiest device of 1, 1.5, 2 and 3
times the mean, with `hot_experts=0` and "auto", by the same clock. Measured: a layer of experts as Mixtral's between
two processes, with a router that sends half of all rows to one expert (`--hot` of its experts copied, or none): CPU
seconds of a step, bytes that leave a process and rows of the busiest one.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.errors import AutoparError
from autopar.utils.format import table

from measured_step import measured, spawned  # isort: skip
from moe_plans import GIB, MAPPINGS, SEQ, Mapping, model_of  # isort: skip

LOADS = (1.0, 1.5, 2.0, 3.0)
HEADS = ["load", "copies", "step s", "of none", "busiest gets", "peak GiB", "copies sent GiB", "rows sent GiB", "CPU s"]


def row(mapping: Mapping, load: float, hot: int | str, none: float | None) -> tuple[list[str], float | None]:
    ids = torch.zeros(mapping.batch, SEQ, dtype=torch.long, device="meta")
    cpu = time.process_time()
    try:
        plan = autopar.plan(
            model_of(mapping), mapping.mesh, {"input_ids": ids, "labels": ids}, hardware="h100", precision="bf16",
            execution="compiled", micro_batches=mapping.micro_batches, schedule=mapping.schedule,
            stages_per_rank=mapping.stages_per_rank, baselines=False, fixes=False, expert_load=load, hot_experts=hot,
            report=lambda text: print(f"{mapping.name} {load} {hot}: {text}", file=sys.stderr),
        )  # fmt: skip
    except AutoparError as error:
        return [f"{load}", str(hot), "-", error.message.split(";")[0][:40], *["-"] * 5], None
    copies, routing, step = plan.expert_copies, plan.routing, plan.step_seconds
    asked = f"{hot}: {plan.hot_experts}" if hot == "auto" else str(hot)
    return [
        f"{load}", asked, f"{step:.3f}", f"{step / none:.3f}" if none else "1", f"{routing.load:.2f}" if routing else "-",
        f"{plan.peak_bytes / GIB:.1f}", f"{copies.sent_bytes / GIB:.1f}" if copies else "-",
        f"{routing.sent_bytes / GIB:.1f}" if routing else "-", f"{time.process_time() - cpu:.0f}",
    ], step  # fmt: skip


class Layer(nn.Module):
    """Tokens through two of so many experts, one of which each token has."""

    def __init__(self, experts: int, hidden: int, inner: int):
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(hidden, experts)
        with torch.no_grad():
            self.router.bias[-1] += 50.0
        self.up = nn.Parameter(torch.randn(experts, hidden, inner) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(experts, inner, hidden) / inner**0.5)

    def forward(self, x: Tensor) -> Tensor:
        weights, which = self.router(x).softmax(-1).topk(2)
        rows, expert = x.repeat_interleave(2, 0), which.reshape(-1)
        y = torch.bmm(rows.unsqueeze(1), self.up[expert]).squeeze(1)
        y = torch.bmm(nn.functional.silu(y).unsqueeze(1), self.down[expert]).squeeze(1)
        return x + (y * weights.reshape(-1, 1)).view(len(x), 2, -1).sum(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=MAPPINGS, help="one of the models")
    parser.add_argument("--measure", action="store_true", help="steps of two processes instead of plans")
    args = parser.parse_args()
    for name in [args.only] if args.only else ("mixtral", "qwen3"):
        mapping = MAPPINGS[name]
        print(f"{mapping.name}, {autopar.Mesh.parse(mapping.mesh).devices} H100, {mapping.mesh}, {mapping.schedule}, "
              f"{mapping.micro_batches} micro-batches of {mapping.batch // mapping.micro_batches} x {SEQ}")  # fmt: skip
        rows = []
        for load in LOADS:
            cells, none = row(mapping, load, 0, None)
            rows += [cells, row(mapping, load, "auto", none)[0]]
        print("\n".join(table(HEADS, rows)), "\n", flush=True)


if __name__ == "__main__":
    main()
