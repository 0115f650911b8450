"""One training step of a sequence that is cut over gloo processes, under autopar's strategies, torch's context parallel
and schemes that are written by hand (benchmarks/by_hand.py).

    OMP_NUM_THREADS=1 python benchmarks/peers_sequence.py [--devices 2,4] [--lengths 4096,8192,16384] [--steps 5]

A row is the CPU time of forward and backward, gradients of parameters summed over all ranks, added up over the
processes, as a median of the steps (wall time says little on cores that are shared); the bytes that a rank sends, of
all that the loopback interface has sent, so nothing else may use it meanwhile; and what resident memory grows by in a
step, on the rank where that is most. Losses are compared. The ratio is to the peer that does the same: the ring by hand
for `ring` and `all_gather_kv`, Ulysses by hand for `ulysses`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))

import autopar
from benchmarks import by_hand
from benchmarks.measured_step import Measured, measured_step, memory_follows_tensors
from tests.helpers import gloo

HIDDEN, LAYERS, HEADS, VOCAB = 256, 2, 8, 512
PEERS = {"ring by hand": by_hand.ring, "ulysses by hand": by_hand.ulysses}
SIDES = {"ring by hand": "", "ring": "ring by hand", "all_gather_kv": "ring by hand", "ulysses by hand": "",
         "ulysses": "ulysses by hand"}  # fmt: skip


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Decoder(nn.Module):
    """Layers of attention and MLPs, and the sum of the losses of the tokens over `tokens`."""

    def __init__(self, tokens: int, attend: Callable = causal):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.attend = tokens, attend
        self.embed, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        self.qkv = nn.ModuleList(nn.Linear(HIDDEN, 3 * HIDDEN, bias=False) for _ in range(LAYERS))
        self.out = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(LAYERS))
        self.up = nn.ModuleList(nn.Linear(HIDDEN, 2 * HIDDEN, bias=False) for _ in range(LAYERS))
        self.down = nn.ModuleList(nn.Linear(2 * HIDDEN, HIDDEN, bias=False) for _ in range(LAYERS))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for qkv, out, up, down in zip(self.qkv, self.out, self.up, self.down):
            q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in qkv(F.rms_norm(x, (HIDDEN,))).chunk(3, -1))
            x = x + out(self.attend(q, k, v).transpose(1, 2).flatten(2))
            x = x + down(F.silu(up(F.rms_norm(x, (HIDDEN,)))))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="sum") / self.tokens


def inputs_of(length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCAB, (1, length + 1), generator=torch.Generator().manual_seed(0))
    return dict(ids=ids[:, :-1], labels=ids[:, 1:])


def made(side: str, rank: int, n: int, length: int) -> Callable[[], torch.Tensor]:
    """Return what makes a step and returns the loss."""
    inputs = inputs_of(length)
    if side in PEERS:
        model = Decoder(length, PEERS[side])
        chunk = {name: x.chunk(n, 1)[rank].contiguous() for name, x in inputs.items()}

        def step():
            model.zero_grad()
            loss = model(**chunk)
            loss.backward()
            whole = torch.cat([p.grad.flatten() for p in model.parameters()] + [loss.detach()[None]])
            dist.all_reduce(whole)
            for p, g in zip(model.parameters(), whole.split([p.numel() for p in model.parameters()] + [1])):
                p.grad = g.view_as(p)
            return whole[-1]

        return step
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("cp",))
    parallel = autopar.compile(Decoder(length), mesh, inputs, strategy=side)

    def ours():
        parallel.zero_grad()
        loss = parallel(**inputs)
        loss.backward()
        return loss.detach()

    return ours


def measured(rank: int, n: int, side: str, length: int, steps: int) -> Measured:
    memory_follows_tensors()
    return measured_step(made(side, rank, n, length), steps)


def of_torch(rank: int, n: int, length: int) -> str:
    """Return what torch's context parallel says on a CPU."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("cp",))
    q = torch.randn(1, HEADS, length, HIDDEN // HEADS)
    whole = causal(q, q, q)
    try:
        with context_parallel(mesh, buffers=[q, whole], buffer_seq_dims=[2, 2]):
            apart = (causal(q, q, q) - whole).abs().max().item()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return f"its attention of a rank's queries is {apart:.1e} from that of all keys"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="2,4")
    parser.add_argument("--lengths", default="4096,8192,16384")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--sides", default=",".join(SIDES))
    a = parser.parse_args()
    print(f"{LAYERS} layers, hidden {HIDDEN}, {HEADS} heads, vocab {VOCAB}, one sample, fp32; {a.steps} steps")
    print("torch's context_parallel on two CPU ranks:", gloo.run(2, of_torch, 2, 64)[0])
    print(f"{'ranks':>5}  {'tokens':>6}  {'side':16}  {'CPU s':>14}  {'MB a rank':>14}  {'MiB in a step':>14}  loss")
    for n in map(int, a.devices.split(",")):
        for length in map(int, a.lengths.split(",")):
            found: dict[str, list[float]] = {}
            for side in a.sides.split(","):
                rows = gloo.run(n, measured, n, side, length, a.steps, seconds=1200)
                columns = [sum(r.seconds for r in rows), rows[0].bytes_ / n / 1e6,
                           max(r.peak_bytes for r in rows) / 2**20]  # fmt: skip
                found[side] = columns
                peer = found.get(SIDES[side])
                cells = [f"{x:7.2f} {x / y:5.2f}x" if peer else f"{x:7.2f}{'':7}"
                         for x, y in zip(columns, peer or columns)]  # fmt: skip
                print(f"{n:5}  {length:6}  {side:16}  {'  '.join(cells)}  {rows[0].loss:.5f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
