"""One training step of a mixture of experts on gloo processes: under autopar's strategies, and with expert parallelism
that is written by hand (benchmarks/experts_by_hand.py).

    OMP_NUM_THREADS=1 python benchmarks/peers_experts.py [--devices 2,4] [--tokens 1024,4096] [--steps 5] [--skewed]

The model is transformers' Mixtral of two layers with eight experts, in bf16 or fp32. A row is the CPU time of forward
and backward, gradients of what all processes have summed over them, added up over the processes, as a median of the
steps (wall time says little on cores that are shared); the bytes that a rank sends, of all that the loopback interface
has sent, so nothing else may use it meanwhile; what resident memory grows by in a step, and the bytes of experts'
weights, on the rank where they are most. Losses and gradients' norms are compared. `--skewed`: the router sends every
token to the same experts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import MixtralConfig, MixtralForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))

import autopar
from benchmarks.experts_by_hand import OwnExperts, loss_of
from benchmarks.measured_step import Measured, measured_step, memory_follows_tensors
from tests.helpers import gloo

MIB, SAMPLE, VOCAB, EXPERTS, HIDDEN = 2**20, 128, 512, 8, 256
BY_HAND = "by hand"
SIDES = (BY_HAND, "expert", "ddp")


class Mixture(nn.Module):
    """Mixtral with the loss of all tokens over their number."""

    def __init__(self, tokens: int, dtype: torch.dtype, skewed: bool):
        super().__init__()
        torch.manual_seed(0)
        config = MixtralConfig(
            vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, num_local_experts=EXPERTS, num_experts_per_tok=2,
        )  # fmt: skip
        self.tokens, self.model = tokens, MixtralForCausalLM(config).to(dtype)
        for name, parameter in self.model.named_parameters() if skewed else ():
            if name.endswith("gate.weight"):
                nn.init.zeros_(parameter)  # equal numbers: the first experts win

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return loss_of(self.model(input_ids=ids, use_cache=False).logits, labels, self.tokens)


def inputs_of(tokens: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCAB, (tokens // SAMPLE, SAMPLE + 1), generator=torch.Generator().manual_seed(0))
    return dict(ids=ids[:, :-1], labels=ids[:, 1:])


Step = Callable[[], torch.Tensor]


def by_hand(rank: int, n: int, model: Mixture, inputs: dict[str, torch.Tensor]) -> Step:
    for layer in model.model.model.layers:
        layer.mlp.experts = OwnExperts(layer.mlp.experts)
    shared = [p for name, p in model.named_parameters() if ".experts." not in name]
    chunk = {name: x.chunk(n)[rank].contiguous() for name, x in inputs.items()}

    def step() -> torch.Tensor:
        model.zero_grad()
        loss = model(**chunk)
        loss.backward()
        whole = torch.cat([p.grad.flatten() for p in shared])
        dist.all_reduce(whole)
        for p, g in zip(shared, whole.split([p.numel() for p in shared])):
            p.grad = g.view_as(p)
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total

    return step


def ours(side: str, n: int, model: Mixture, inputs: dict[str, torch.Tensor]) -> tuple[nn.Module, Step]:
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("ep",))
    parallel = autopar.compile(model, mesh, inputs, strategy=side)

    def step() -> torch.Tensor:
        parallel.zero_grad()
        loss = parallel(**inputs)
        loss.backward()
        return loss.detach()

    return parallel, step


@dataclass
class Row(Measured):
    """Holds what one process measured, the bytes of its experts, and the square of all experts' gradients' norm."""

    expert_bytes: int
    norm: float


def measured(rank: int, n: int, side: str, tokens: int, steps: int, dtype: torch.dtype, skewed: bool) -> Row:
    memory_follows_tensors()
    model, inputs = Mixture(tokens, dtype, skewed), inputs_of(tokens)
    if side == BY_HAND:
        step = by_hand(rank, n, model, inputs)
    else:
        model, step = ours(side, n, model, inputs)
    found = measured_step(step, steps)
    local = [(name, *map(_local, (p.detach(), p.grad))) for name, p in model.named_parameters()]
    held = sum(p.nbytes for name, p, _ in local if ".experts." in name)
    of_experts = sum(float(g.double().square().sum()) for name, _, g in local if ".experts." in name)
    squares = torch.tensor([of_experts], dtype=torch.float64)
    if held < EXPERTS * 3 * 2 * HIDDEN * HIDDEN * 2 * dtype.itemsize:  # of two layers: else each process has all
        dist.all_reduce(squares)
    return Row(**vars(found), expert_bytes=held, norm=squares.item())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="2,4")
    parser.add_argument("--tokens", default="1024,4096")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--skewed", action="store_true", help="all tokens to the same experts")
    parser.add_argument("--sides", default=",".join(SIDES))
    a = parser.parse_args()
    print(f"Mixtral, 2 layers, hidden {HIDDEN}, {EXPERTS} experts, 2 a token, samples of {SAMPLE}; {a.steps} steps")
    names = ("CPU s", "MB a rank", "MiB in a step", "MiB of experts")
    print(f"{'dtype':8}  {'ranks':>5}  {'tokens':>6}  {'side':8}  {'  '.join(f'{x:>14}' for x in names)}  loss  norm")
    for dtype in (getattr(torch, name) for name in a.dtypes.split(",")):
        for n in map(int, a.devices.split(",")):
            for tokens in map(int, a.tokens.split(",")):
                peer: list[float] = []
                for side in a.sides.split(","):
                    rows = gloo.run(n, measured, n, side, tokens, a.steps, dtype, a.skewed, seconds=600)
                    memory = [max(getattr(r, name) for r in rows) / MIB for name in ("peak_bytes", "expert_bytes")]
                    columns = [sum(r.seconds for r in rows), rows[0].bytes_ / n / 1e6, *memory]
                    ratios = [f"{x / y:5.2f}x" if peer else " " * 6 for x, y in zip(columns, peer or columns)]
                    cells = "  ".join(f"{x:7.2f} {ratio}" for x, ratio in zip(columns, ratios))
                    peer = columns if side == BY_HAND else peer
                    name = str(dtype).removeprefix("torch.")
                    tail = f"{rows[0].loss:.5f}  {rows[0].norm:.4e}"
                    print(f"{name:8}  {n:5}  {tokens:6}  {side:8}  {cells}  {tail}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
