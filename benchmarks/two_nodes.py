"""Measure a step on nodes that a slow network joins: strategies, and collectives by tier against the same at once.

Start it under torchrun on every node, with a profile of two tiers of links:

    OMP_NUM_THREADS=1 torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:PORT \\
        benchmarks/two_nodes.py --hardware two_nodes.toml --count FILE

Prints for each strategy on each mesh the predicted and the measured seconds of a forward and backward, the least of
several, in which the strategies take turns; the bytes that its collectives send from a node, in closed form; and those
that left this node, if FILE holds a counter of them as its first word. A mesh with stages has the plan that is found.
With --at-once what runs tier by tier is measured at once too.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parent.parent))

import autopar
from autopar.compiler import lower
from autopar.hardware.profile import load
from autopar.ir.mesh import Mesh
from autopar.models import build
from autopar.simulate.step import plan_and_capture
from autopar.utils.format import table
from benchmarks.predicted import kendall_tau

MODEL = "gpt:hidden=256,layers=4,heads=4,vocab=1024,seq=64"
SETTLED_SECONDS = 0.4  # after which a counter has counted all that was sent


@dataclass
class Row:
    """One strategy: `seconds` and `sent_bytes` of each round, and the bytes that its collectives send from a node."""

    name: str
    model: autopar.ParallelModule
    sent_in_theory: float = math.nan
    seconds: list[float] = field(default_factory=list)
    sent_bytes: list[int] = field(default_factory=list)


def main() -> None:
    """Run all rounds and print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", required=True, help="a profile with two tiers of links")
    parser.add_argument("--meshes", default="dp=4;dp=2,tp=2;tp=2,dp=2;pp=2,dp=2;dp=2,pp=2")
    parser.add_argument("--strategies", default="ddp,zero1,zero2,fsdp,hsdp,megatron,megatron_sp,auto")
    parser.add_argument("--at-once", action="store_true")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--count", type=Path, help="a file with the bytes that left this node")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    hardware, rows = load(args.hardware), []
    for text in args.meshes.split(";"):
        shape = Mesh.parse(text)
        mesh = init_device_mesh("cpu", shape.sizes, mesh_dim_names=shape.names)
        inputs = build(MODEL, batch=args.batch, seq=64, device="cpu")[1]
        if "pp" in shape.names:
            plan = autopar.plan(_model(args.batch), shape, inputs, hardware=hardware, precision="fp32")
            rows.append(
                Row(f"{text} auto", autopar.compile(_model(args.batch), mesh, inputs, plan=plan, hardware=hardware))
            )
            continue
        for strategy in args.strategies.split(","):
            if strategy in ("hsdp", "megatron", "megatron_sp") and len(shape.names) == 1:
                continue
            asked = dict(hardware=hardware, strategy=strategy, baselines=False)
            plan, captured = plan_and_capture(_model(args.batch), shape, inputs, **asked)
            at_once = replace(plan, sharding=replace(plan.sharding, hierarchy={}))
            both = ((f"{text} {strategy}, at once", at_once), (f"{text} {strategy}", plan))
            for name, chosen in both[not (args.at_once and plan.sharding.hierarchy) :]:
                sent = leaving_bytes(lower(captured, chosen, dist.get_rank()).local, shape)
                rows.append(
                    Row(name, autopar.compile(_model(args.batch), mesh, inputs, plan=chosen, hardware=hardware), sent)
                )
    for row in rows:
        row.model(**inputs).loss.backward()
    for _ in range(args.rounds):
        for row in rows:
            measure(row, inputs, args.count)
    if dist.get_rank() == 0:
        print_table(rows)
    dist.destroy_process_group()


def _model(batch: int) -> nn.Module:
    return build(MODEL, batch=batch, seq=64, device="cpu")[0]


def leaving_bytes(local: fx.GraphModule, mesh: Mesh) -> float:
    """Return the bytes that collectives of all ranks of this node send to others. Of a ring one edge leaves the node,
    whoever of the group is on it; of an all-to-all what is for the others does."""
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    total, node = 0.0, dist.get_rank() // ranks
    for started in (n for n in local.graph.nodes if n.meta.get("collective")):
        group, sent = (
            mesh.group(started.meta["collective"].axes, dist.get_rank()),
            started.meta["collective"].wire_bytes,
        )
        here = sum(rank // ranks == node for rank in group)
        if here == len(group):
            continue
        is_exchange = started.target is torch.ops._c10d_functional.all_to_all_single.default
        total += sent * (len(group) - here) / (len(group) - 1) if is_exchange else sent / here
    return total * ranks


def measure(row: Row, inputs: dict, count: Path | None) -> None:
    """Run one forward and backward."""
    dist.barrier()
    time.sleep(SETTLED_SECONDS)
    before, start = counted(count), time.perf_counter()
    row.model(**inputs).loss.backward()
    row.seconds.append(time.perf_counter() - start)
    dist.barrier()
    time.sleep(SETTLED_SECONDS)
    row.sent_bytes.append(counted(count) - before)


def counted(count: Path | None) -> int:
    """Return the bytes that have left this node."""
    return int(count.read_text().split()[0]) if count else 0


def print_table(rows: list[Row]) -> None:
    """Print predictions beside what was measured; a plan whose all-reduces were put together again predicts nothing."""
    columns = [
        [row.name for row in rows],
        ["" if row.name.endswith("at once") else f"{row.model.plan.step_seconds:.3f}" for row in rows],
        [f"{min(row.seconds):.3f}" for row in rows],
        [f"{row.model.plan.step_seconds / min(row.seconds):.2f}" for row in rows],
        ["" if math.isnan(row.sent_in_theory) else f"{row.sent_in_theory / 1e6:.2f}" for row in rows],
        [f"{sorted(row.sent_bytes)[len(rows[0].sent_bytes) // 2] / 1e6:.2f}" for row in rows],
    ]
    print(
        "\n".join(
            table(
                ["mesh and strategy", "predicted s", "measured s", "ratio", "MB a node sends", "MB that left it"],
                list(zip(*columns)),
                left=1,
            )
        )
    )
    planned = [row for row in rows if not row.name.endswith("at once")]
    tau = kendall_tau([row.model.plan.step_seconds for row in planned], [min(row.seconds) for row in planned])
    print(f"\nKendall's tau of {len(planned)} rows, of pairs whose measured seconds differ by more than 5 %: {tau:.2f}")


if __name__ == "__main__":
    main()
