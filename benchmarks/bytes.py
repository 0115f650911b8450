"""Bytes of one training step, four times over: predicted by the plan, counted in the lowered graphs, by a closed
formula, and seen on the loopback interface while gloo processes run the step; with --peers also what torch's own DDP
and FSDP2 send.

    OMP_NUM_THREADS=1 python benchmarks/bytes.py [--devices 4] [--peers]

All figures are MB sent by all devices together. The interface counts everything on the machine, headers of TCP
included, so nothing else may use it meanwhile.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parent.parent))

import autopar
from autopar import compiler, models
from autopar.compiler import lower
from tests.helpers import gloo

HIDDEN, LAYERS, VOCAB, BATCH, SEQ = 256, 4, 512, 16, 128
MODEL = f"llama:hidden={HIDDEN},layers={LAYERS},heads=8,kv_heads=8,ffn=1024,vocab={VOCAB}"
STEPS = 4
STRATEGIES = {"ddp": "dp", "zero1": "dp", "zero2": "dp", "fsdp": "dp", "megatron": "tp", "megatron_sp": "tp"}


def sent_on_loopback() -> int:
    """Bytes that the loopback interface has sent since the machine started (Linux)."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[8])
    raise RuntimeError("this machine has no loopback interface in /proc/net/dev")


def formula_bytes(strategy: str, n: int) -> float:
    """Sent by one device.

    Data parallel: 2 or 3 times the parameters (ZeRO, arXiv 1910.02054, section 7); fully sharded gathers the embedding
    only once, as no gradient reads it. Tensor parallel: four all-reduces of an activation a layer (Megatron-LM,
    arXiv 1909.08053, section 3), here as gathers and scatters of the same bytes (arXiv 2205.05198, section 4.2.2), one
    scatter for the gradient that the head returns, the small embedding gathered (and with sequence parallelism its
    gradient scattered), and rows of scalars: the vocabulary-parallel loss sums three, a norm over a sharded hidden dim
    one forward and one backward, and norms over a sharded sequence all-reduce their weights' gradients."""
    model, _ = models.build(MODEL, batch=BATCH, seq=SEQ)
    parameters = {name: 4 * p.numel() for name, p in model.named_parameters()}
    embedding, share, norms = 4 * VOCAB * HIDDEN, (n - 1) / n, 2 * LAYERS + 1
    if strategy in ("ddp", "zero1", "zero2"):
        return 2 * share * sum(parameters.values())
    if strategy == "fsdp":
        return share * (3 * sum(parameters.values()) - embedding)
    row = 4 * BATCH * SEQ
    activations = row * HIDDEN * (8 * LAYERS + 1)
    if strategy == "megatron":
        return share * (activations + embedding + 2 * row * (3 + 2 * norms))
    return share * (activations + 2 * embedding + 2 * (3 * row + 4 * norms * HIDDEN))


def counted_bytes(captured, plan) -> float:
    return sum(
        node.meta["collective"].wire_bytes
        for rank in range(plan.mesh.devices)
        for node in lower(captured, plan, rank).local.graph.nodes
        if "collective" in node.meta
    )


def measured_bytes(step) -> float:
    """Bytes on the interface of one call of `step`, on rank 0; every rank calls this."""
    step()
    step()
    dist.barrier()
    before = sent_on_loopback()
    dist.barrier()
    for _ in range(STEPS):
        step()
    dist.barrier()
    return (sent_on_loopback() - before) / STEPS


def _batch():
    torch.manual_seed(0)
    return models.build(MODEL, batch=BATCH, seq=SEQ, device="cpu")


def run_autopar(rank: int, n: int, axis: str, plan) -> float:
    model, inputs = _batch()
    parallel = autopar.compile(model, init_device_mesh("cpu", (n,), mesh_dim_names=(axis,)), inputs, plan=plan)

    def step():
        parallel(**inputs).loss.backward()
        parallel.zero_grad()

    return measured_bytes(step)


def run_peer(rank: int, n: int, name: str) -> float:
    """torch's own, on each device's part of the batch."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model, inputs = _batch()
    inputs = {k: v.chunk(n)[rank] for k, v in inputs.items()}
    if name == "DDP":
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (n,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def step():
        model(**inputs).loss.backward()
        model.zero_grad()

    return measured_bytes(step)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--peers", action="store_true")
    a = parser.parse_args()
    warnings.filterwarnings("ignore")
    n = a.devices
    captured = compiler.trace(*models.build(MODEL, batch=BATCH, seq=SEQ))
    print(f"{MODEL}, batch {BATCH} x {SEQ}, fp32, {n} gloo processes; MB sent by all")
    print(
        f"{'strategy':12} {'predicted':>10} {'counted':>10} {'formula':>10} {'loopback':>10}  largest difference to "
        f"predicted"
    )
    wrong = 0
    for strategy in a.strategies.split(","):
        axis = STRATEGIES[strategy]
        model, inputs = models.build(MODEL, batch=BATCH, seq=SEQ)
        plan = autopar.plan(model, f"{axis}={n}", inputs, hardware="cpu-gloo", strategy=strategy, baselines=False)
        figures = [
            n * sum(c.wire_bytes for c in plan.collectives),
            counted_bytes(captured, plan),
            n * formula_bytes(strategy, n),
            gloo.run(n, run_autopar, n, axis, plan, seconds=300)[0],
        ]
        difference = max(abs(f / figures[0] - 1) for f in figures)
        wrong += difference > 0.01
        print(f"{strategy:12} " + " ".join(f"{f / 1e6:10.3f}" for f in figures) + f"  {difference:.2%}", flush=True)
    for name in ("DDP", "FSDP2") if a.peers else ():
        sent = gloo.run(n, run_peer, n, name, seconds=300)[0]
        print(f"torch {name:6} {'':>32} {sent / 1e6:10.3f}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
