"""Tell what copies of hot experts gain under uneven routing: planned steps of large models, and steps of two processes.

    OMP_NUM_THREADS=1 python benchmarks/hot_experts.py [--only qwen3] >> benchmarks/results/hot_experts.txt
    OMP_NUM_THREADS=1 python benchmarks/hot_experts.py --measure >> benchmarks/results/hot_experts.txt

Plans are the mappings of benchmarks/moe_plans.py (experts' layouts pinned, expert+megatron_sp+zero1), for loads of the
busiest device of 1, 1.5, 2 and 3 times the mean, with `hot_experts=0` and "auto", by the same clock.

Measured: two layers of eight experts between two processes, with routers that give each token one of the experts that
has half of all rows, and a second one of the others. A row is the CPU time of forward and backward of both processes
and of the one that takes longer, as a median of the steps (wall time says little on cores that are shared), the bytes
that a process sends, of all that the loopback interface has sent, so nothing else may use it meanwhile, what resident
memory grows by in a step on the process where that is most, the rows of the busiest process over the mean, and how far
gradients are from those of one process, by norm.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parent.parent))

import autopar
from autopar.errors import AutoparError
from autopar.utils.format import table
from benchmarks.measured_step import Measured, measured_step, memory_follows_tensors
from benchmarks.moe_plans import GIB, MAPPING, MAPPINGS, SEQ, Mapping, model_of
from tests.helpers import gloo

LOADS = (1.0, 1.5, 2.0, 3.0)
MIB, EXPERTS, HIDDEN, INNER = 2**20, 8, 256, 512
PLANNED = ["load", "copied", "step s", "of none", "busiest gets", "peak GiB", "copies GiB", "rows GiB", "CPU s"]
MEASURED = ["copied", "CPU s", "of one", "sent MiB", "memory MiB", "busiest gets", "error"]


def row(mapping: Mapping, load: float, hot: int | str, none: float | None) -> tuple[list[str], float | None]:
    """A line of the table, and the seconds of the step."""
    ids = torch.zeros(mapping.batch, SEQ, dtype=torch.long, device="meta")
    cpu = time.process_time()
    try:
        plan = autopar.plan(
            model_of(mapping), mapping.mesh, {"input_ids": ids, "labels": ids}, hardware="h100", precision="bf16",
            execution="compiled", micro_batches=mapping.micro_batches, schedule=mapping.schedule,
            stages_per_rank=mapping.stages_per_rank, baselines=False, fixes=False, strategy=MAPPING,
            pin=mapping.of_experts, expert_load=load, hot_experts=hot,
            report=lambda text: print(f"{mapping.name} {load} {hot}: {text}", file=sys.stderr),
        )  # fmt: skip
    except AutoparError as error:
        return [f"{load}", str(hot), "-", error.message.split(";")[0][:40], *["-"] * 5], None
    copies, routing, step = plan.expert_copies, plan.routing, plan.step_seconds
    asked = f"{hot}: {plan.hot_experts}" if hot == "auto" else str(hot)
    return [
        f"{load}", asked, f"{step:.3f}", f"{step / none:.3f}" if none else "1",
        f"{routing.load:.2f}" if routing else "-", f"{plan.peak_bytes / GIB:.1f}",
        f"{copies.sent_bytes / GIB:.1f}" if copies else "-", f"{routing.sent_bytes / GIB:.1f}" if routing else "-",
        f"{time.process_time() - cpu:.0f}",
    ], step  # fmt: skip


class Layer(nn.Module):
    """Tokens through two of the experts, one of which is the last for all tokens."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS)
        with torch.no_grad():
            self.router.bias[-1] += 50.0
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER) / HIDDEN**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN) / INNER**0.5)

    def forward(self, x: Tensor) -> Tensor:
        weights, which = self.router(x).softmax(-1).topk(2)
        rows, expert = x.repeat_interleave(2, 0), which.reshape(-1)
        y = torch.bmm(rows.unsqueeze(1), self.up[expert]).squeeze(1)
        y = torch.bmm(nn.functional.silu(y).unsqueeze(1), self.down[expert]).squeeze(1)
        return x + (y * weights.reshape(-1, 1)).view(len(x), 2, HIDDEN).sum(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layers = nn.Linear(HIDDEN, HIDDEN), nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def steps_of(rank: int, tokens: int, hot: int, steps: int) -> tuple[Measured, float, float]:
    """Return what a process measured, the load of the busiest, and the error of gradients."""
    memory_follows_tensors()
    torch.manual_seed(1)
    x = torch.randn(tokens, HIDDEN)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    plan = autopar.plan(Net(), mesh, (x,), strategy="expert", baselines=False)
    assert plan.routing is not None  # rows are sent, and as they are without copies
    model = autopar.compile(Net(), mesh, (x,), plan=replace(plan, hot_experts=hot))

    def step() -> Tensor:
        model.zero_grad()
        loss = model(x)
        loss.backward()
        return loss

    found, reference = measured_step(step, steps), Net()
    load, error = model.expert_balance().load, 0.0
    for part in x.split(256):  # it has a matrix for each row
        (reference(part) * (len(part) / tokens)).backward()
    wanted = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        whole = parameter.grad.full_tensor()
        error = max(error, float((whole - wanted[name].grad).norm() / wanted[name].grad.norm()))
    return found, load, error


def measure(tokens: int, steps: int) -> None:
    print(f"{EXPERTS} experts of {HIDDEN} x {INNER}, two layers, 2 gloo processes, {tokens} tokens, fp32")
    rows = []
    for hot in (0, 1, 2):
        one, other = gloo.run(2, steps_of, tokens, hot, steps, seconds=900)
        seconds = [one[0].seconds, other[0].seconds]
        memory = max(one[0].peak_bytes, other[0].peak_bytes)
        rows.append([
            str(hot), f"{sum(seconds):.3f}", f"{max(seconds):.3f}", f"{one[0].bytes_ / 2 / MIB:.2f}",
            f"{memory / MIB:.1f}", f"{one[1]:.2f}", f"{max(one[2], other[2]):.1e}",
        ])  # fmt: skip
    print("\n".join(table(MEASURED, rows)), "\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=MAPPINGS, help="one of the models")
    parser.add_argument("--loads", default=",".join(map(str, LOADS)), help="of the busiest device, over the mean")
    parser.add_argument("--measure", action="store_true", help="steps of two processes instead of plans")
    parser.add_argument("--tokens", default="1024,8192", help="of the steps that are measured")
    parser.add_argument("--steps", type=int, default=7)
    args = parser.parse_args()
    if args.measure:
        for tokens in args.tokens.split(","):
            measure(int(tokens), args.steps)
        return
    for name in [args.only] if args.only else MAPPINGS:
        mapping = MAPPINGS[name]
        print(f"{mapping.name}, {autopar.Mesh.parse(mapping.mesh).devices} H100, {mapping.mesh}, {mapping.schedule}, "
              f"{mapping.micro_batches} micro-batches of {mapping.batch // mapping.micro_batches} x {SEQ}")  # fmt: skip
        rows = []
        for load in map(float, args.loads.split(",")):
            cells, none = row(mapping, load, 0, None)
            rows += [cells, row(mapping, load, "auto", none)[0]]
        print("\n".join(table(PLANNED, rows)), "\n", flush=True)


if __name__ == "__main__":
    main()
