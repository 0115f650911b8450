"""Compare steps with looped collectives to the same steps without, on gloo processes: exactness, bytes and seconds.

    OMP_NUM_THREADS=1 python benchmarks/loops.py                       # 2, 3 and 4 processes
    OMP_NUM_THREADS=1 python benchmarks/loops.py --ranks 2 --hidden 512 --seq 512

Prints for each model and mesh, without loops and with all that the plan has a place for: the number of loops and of
their messages, the largest relative error of the loss and of a gradient against one process in fp64, the bytes that
rank 0 sends in a step, as counted where collectives are called and as planned, and the seconds of a forward and
backward of the slowest rank, the median of several. Collectives of gloo run on the cores that compute, so that loops
gain nothing here; a plan with `loops="auto"` has none of them. What it printed is in benchmarks/results/loops.txt.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import autopar
from autopar import Mesh, models
from autopar.utils.format import table

MODELS = {  # sizes that 2, 3 and 4 divide
    "gpt": "gpt:hidden={hidden},layers=2,heads=12,vocab=480,seq=960",
    "llama": "llama:hidden={hidden},layers=2,heads=12,vocab=480,seq=960",
    "grouped": "llama:hidden={hidden},layers=2,heads=12,kv_heads=6,vocab=480,seq=960",
}
MESHES = {2: ("tp=2",), 3: ("tp=3",), 4: ("tp=4", "dp=2,tp=2")}


@dataclass(frozen=True)
class Row:
    """Says what one program did. Bytes are rank 0's, seconds the slowest rank's."""

    model: str
    mesh: str
    seq: int
    loops: int
    messages: int
    error: float
    sent_bytes: float
    planned_bytes: float
    seconds: float


class Sent(TorchDispatchMode):
    """Counts the bytes that this rank sends to others, by the formulas of rings."""

    def __init__(self):
        super().__init__()
        self.bytes_, self.messages = 0.0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        if name.startswith("_c10d_functional::") and "wait" not in name or "gather_b" in name:
            tensors = [x for x in tree_leaves(args[0]) if isinstance(x, torch.Tensor)]
            held = sum(x.nbytes for x in tensors)
            if "all_to_all" in name:
                sent, rank = args[2], dist.get_rank(dist.distributed_c10d._resolve_process_group(args[3]))
                self.bytes_ += held * (sum(sent) - sent[rank]) / max(1, sum(sent))
                self.messages += sorted(sent)[-2:] == [0, 1]
            else:
                n = dist.distributed_c10d._resolve_process_group(args[-1]).size()
                self.bytes_ += held * ((n - 1) if "gather" in name else 2 * (n - 1) / n)
        return function(*args, **(kwargs or {}))


def found_by(model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the loss and all gradients of a step, whole."""
    whole = {name: p.grad for name, p in model.named_parameters()}
    whole = {name: g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for name, g in whole.items()}
    return {"loss": loss.detach()} | whole


def error_of(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Return the largest relative error."""
    return max(float((found[name] - value).norm() / value.norm()) for name, value in wanted.items())


def run(rank: int, args, store: str, name: str, mesh: str, seq: int, rows) -> None:
    shape = Mesh.parse(mesh)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=shape.devices)
    torch.set_num_threads(1)
    text = MODELS[name].format(hidden=args.hidden)
    reference, batch = models.build(text, batch=args.batch, seq=seq, device="cpu", seed=0)
    reference = reference.double()
    wanted = reference(**batch).loss
    device_mesh = init_device_mesh("cpu", shape.sizes, mesh_dim_names=shape.names)
    source = copy.deepcopy(reference)
    wanted.backward()
    expected = found_by(reference, wanted)
    for loops in ("never", "always"):
        options = dict(strategy="megatron_sp", loops=loops, check_every=None)
        model = autopar.compile(copy.deepcopy(source), device_mesh, batch, **options)
        with Sent() as sent:
            loss = model(**batch).loss
            loss.backward()
        error = error_of(found_by(model, loss), expected)
        seconds = []
        for _ in range(args.steps):
            dist.barrier()
            start = time.perf_counter()
            model(**batch).loss.backward()
            seconds.append(time.perf_counter() - start)
        slowest = torch.tensor(statistics.median(seconds), dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if rank == 0:
            planned = sum(c.wire_bytes for c in model.plan.collectives)
            count = len(model.plan.sharding.loops)
            rows.append(Row(name, mesh, seq, count, sent.messages, error, sent.bytes_, planned, slowest.item()))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for option, default in (("hidden", 192), ("seq", 120), ("batch", 4), ("steps", 5)):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 3, 4])
    args = parser.parse_args()
    cases = [
        (name, mesh, seq)
        for ranks in args.ranks
        for mesh in MESHES[ranks]
        for name in MODELS
        for seq in (args.seq, args.seq - 7)[: 1 + (name == "grouped")]
    ]
    with multiprocessing.Manager() as manager:
        rows = manager.list()
        for name, mesh, seq in cases:
            with tempfile.TemporaryDirectory() as folder:
                store = f"file://{folder}/store"
                multiprocessing.spawn(run, (args, store, name, mesh, seq, rows), Mesh.parse(mesh).devices)
        found = list(rows)
    print(f"fp64, hidden {args.hidden}, 2 layers, {args.batch} samples, megatron_sp, gloo processes on shared cores")
    cells = [
        [r.model, r.mesh, str(r.seq), str(r.loops), str(r.messages), f"{r.error:.1e}",
         f"{r.sent_bytes:,.0f}", f"{r.planned_bytes:,.0f}", f"{r.seconds * 1e3:.0f}"] for r in found
    ]  # fmt: skip
    header = ["model", "mesh", "tokens", "loops", "messages", "error", "B sent", "B planned", "ms"]
    print("\n".join(table(header, cells)))
    pairs = list(zip(found[::2], found[1::2]))
    equal = sum(plain.sent_bytes == looped.sent_bytes for plain, looped in pairs)
    print(f"\n{equal} of {len(pairs)} pairs send the same bytes; largest error {max(r.error for r in found):.1e}")


if __name__ == "__main__":
    main()
