"""Measure what expert parallelism costs and saves: a mixture of experts on gloo, its experts on every rank or cut.

    OMP_NUM_THREADS=1 python benchmarks/experts.py                            # 4 processes, 8 experts
    OMP_NUM_THREADS=1 python benchmarks/experts.py --ranks 2 --experts 16 --routing one

Prints for each strategy the bytes of expert weights that a rank holds, what the plan sends in a step, and the CPU
seconds of a step (forward, backward and AdamW) of the slowest rank, the median of several. `--routing one`: the router
is made to send every token to the same experts, the worst that balanced prices do not see.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import MixtralConfig, MixtralForCausalLM

import autopar
from autopar.utils.format import table

MIB = 2**20


@dataclass(frozen=True)
class Row:
    """Says what one strategy took. Bytes are a rank's, seconds the slowest rank's."""

    strategy: str
    expert_bytes: int
    sent_bytes: float
    cpu_seconds: float


def model_of(args) -> nn.Module:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=512, hidden_size=args.hidden, intermediate_size=2 * args.hidden, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=args.experts, num_experts_per_tok=2,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    if args.routing == "one":
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                nn.init.zeros_(parameter)  # equal numbers: the first experts win
    return model


def run(rank: int, args, store: str, strategy: str, rows) -> None:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=args.ranks)
    torch.set_num_threads(1)
    ids = torch.randint(3, 512, (2 * args.ranks, args.seq), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    mesh = init_device_mesh("cpu", (args.ranks,), mesh_dim_names=("ep",))
    model = autopar.compile(model_of(args), mesh, batch, strategy=strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    seconds = []
    for _ in range(args.steps):
        start = time.process_time()
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - start)
    slowest = torch.tensor(statistics.median(seconds[1:]), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    held = sum(p.to_local().nbytes for name, p in model.named_parameters() if ".experts." in name)
    if rank == 0:
        sent = sum(c.wire_bytes for c in model.plan.collectives)
        rows.append(Row(strategy, held, sent, slowest.item()))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("ranks", 4), ("experts", 8), ("hidden", 256), ("seq", 128), ("steps", 6)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--routing", choices=("learned", "one"), default="learned")
    parser.add_argument("--strategies", default="ddp,expert,expert+zero1,fsdp")
    args = parser.parse_args()
    with multiprocessing.Manager() as manager:
        rows = manager.list()
        for strategy in args.strategies.split(","):
            with tempfile.TemporaryDirectory() as folder:
                multiprocessing.spawn(run, (args, f"file://{folder}/store", strategy, rows), args.ranks)
        found = list(rows)
    whole = found[0].expert_bytes
    tokens = 2 * args.ranks * args.seq
    print(f"{args.experts} experts, 2 a token, {args.ranks} gloo processes, {tokens} tokens, routing {args.routing}")
    cells = [
        [r.strategy, f"{r.expert_bytes / MIB:.1f}", f"{r.expert_bytes / whole:.2f}", f"{r.sent_bytes / MIB:.1f}",
         f"{r.cpu_seconds:.3f}"] for r in found
    ]  # fmt: skip
    print("\n".join(table(["strategy", "experts MiB", "of the first", "sent MiB", "CPU s"], cells)))


if __name__ == "__main__":
    main()
