"""One training step of the same model by autopar and by torch's own DDP, ZeRO-1, FSDP2, TP and TP+SP, or PEFT's LoRA
under DDP and FSDP2, in the same gloo processes, the two taking turns step by step.

    OMP_NUM_THREADS=1 python benchmarks/peers.py [--devices 2,4] [--pairs ddp,fsdp] [--steps 12] [--compile]

A row is a median of the steps: CPU time of all processes (of forward and backward, and of the optimizer; wall time says
little on cores that are shared), bytes on the loopback interface, the largest sum of live tensors on any process, and
the loss after the last step. `--compile` adds autopar's graphs through torch.compile (`model.compile()`), which takes
minutes to compile.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parent.parent))

import autopar
from autopar import models
from autopar.adapt import order
from benchmarks.bytes import sent_on_loopback
from tests.helpers import gloo

HIDDEN, LAYERS, VOCAB, BATCH, SEQ, LR = 256, 4, 2048, 8, 128, 1e-3
MODEL = f"llama:hidden={HIDDEN},layers={LAYERS},heads=8,kv_heads=8,ffn=1024,vocab={VOCAB}"
PAIRS = {"ddp": "DDP", "zero1": "ZeRO-1", "fsdp": "FSDP2", "megatron": "TP", "megatron_sp": "TP+SP"}
ADAPTED = {"lora": "PEFT+DDP", "lora_fsdp": "PEFT+FSDP2"}  # with adapters, by the strategy
STRATEGY = {"lora": "ddp", "lora_fsdp": "fsdp", "auto": None}
LORA = dict(
    r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
)


@dataclass
class Side:
    """One way to train: `forward_backward()` returns the loss of the whole batch on this rank (a part of it if
    `averaged`)."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    inputs: dict
    averaged: bool = False

    def forward_backward(self) -> torch.Tensor:
        loss = self.module(**self.inputs).loss
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def build():
    torch.manual_seed(0)
    return models.build(MODEL, batch=BATCH, seq=SEQ, device="cpu")


def ours(strategy: str, n: int) -> Side:
    model, inputs = build()
    axis = "tp" if strategy.startswith("megatron") else "dp"
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=(axis,))
    adapt = [autopar.LoRA(**LORA)] if strategy in ADAPTED else ()
    parallel = autopar.compile(model, mesh, inputs, strategy=STRATEGY.get(strategy, strategy), adapt=adapt)
    return Side(parallel, adamw(parallel), inputs)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=LR)


def ours_compiled(strategy: str, n: int) -> Side:
    side = ours(strategy, n)
    side.module.compile()
    return side


def peer(strategy: str, rank: int, n: int) -> Side:
    """torch's own, as its documentation shows it, each on its part of the batch where that is the way."""
    model, inputs = build()
    if strategy.startswith("megatron"):
        _tensor_parallel(model, n, sequence=strategy == "megatron_sp")
        # norms stay plain tensors under TP, and a foreach optimizer refuses to mix them with DTensors
        return Side(model, torch.optim.AdamW(model.parameters(), lr=LR, foreach=False), inputs)
    inputs = {k: v.chunk(n)[rank] for k, v in inputs.items()}
    layers = model.layers
    if strategy in ADAPTED:
        model = _peft(model)
    strategy = STRATEGY.get(strategy, strategy)
    if strategy == "fsdp":
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (n,))
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return Side(model, adamw(model), inputs, averaged=True)
    module = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if strategy == "ddp":
        return Side(module, adamw(module), inputs, averaged=True)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return Side(module, ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=LR), inputs, averaged=True)


def _peft(model: nn.Module) -> nn.Module:
    """The model with PEFT's adapters, which start as autopar's do."""
    import peft

    start, _ = build()
    order.attach(start, [autopar.LoRA(**LORA)], "cpu", torch.initial_seed())
    adapted = peft.get_peft_model(model, peft.LoraConfig(**LORA))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(start.get_parameter(name.replace("base_model.model.", "").replace(".default", "")))
    return adapted


def _tensor_parallel(model: nn.Module, n: int, sequence: bool) -> None:
    """The plan of torch's tensor parallelism tutorial for a Llama."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    column, row = ColwiseParallel, RowwiseParallel
    block = {f"self_attn.{p}_proj": column() for p in "qkv"} | {"mlp.gate_proj": column(), "mlp.up_proj": column()}
    if sequence:
        cut = {"output_layouts": Shard(1)}
        top = {
            "embed_tokens": row(input_layouts=Replicate(), **cut), "norm": SequenceParallel(),
            "lm_head": column(input_layouts=Shard(1), output_layouts=Replicate()),
        }  # fmt: skip
        gather = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
        tables = {"input_layouts": (Shard(1), None, None), "desired_input_layouts": (Replicate(), None, None)}
        block |= {
            "input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel(),
            "self_attn": PrepareModuleInput(**tables), "mlp": PrepareModuleInput(**gather),
        }  # fmt: skip
    else:
        cut = {}
        top = {"embed_tokens": row(input_layouts=Replicate()), "lm_head": column(output_layouts=Replicate())}
    block |= {"self_attn.o_proj": row(**cut), "mlp.down_proj": row(**cut)}
    mesh = init_device_mesh("cpu", (n,))
    parallelize_module(model, mesh, top)
    for layer in model.layers:
        parallelize_module(layer, mesh, block)
        layer.self_attn.heads //= n
        layer.self_attn.kv_heads //= n


@dataclass
class Row:
    """Holds medians over the steps of one process, and in `losses` those of all steps."""

    seconds: float
    optimizer_seconds: float
    bytes_: float
    losses: list[float]


def makers(rank: int, n: int, strategy: str, compiled: bool) -> dict[str, Callable[[], Side]]:
    make = {"autopar": lambda: ours(strategy, n)}
    if compiled:
        make["compiled"] = lambda: ours_compiled(strategy, n)
    if strategy in PAIRS or strategy in ADAPTED:
        make["peer"] = lambda: peer(strategy, rank, n)
    return make


def race(rank: int, n: int, strategy: str, steps: int, compiled: bool) -> dict[str, Row]:
    """The sides' rows on this process."""
    sides = {name: made() for name, made in makers(rank, n, strategy, compiled).items()}
    times: dict[str, list] = {name: [] for name in sides}
    losses: dict[str, list] = {name: [] for name in sides}
    for _ in range(steps + 2):
        for name, side in sides.items():
            dist.barrier()
            before, start = sent_on_loopback(), time.process_time()
            loss = side.forward_backward()
            middle = time.process_time()
            side.update()
            end = time.process_time()
            dist.barrier()
            times[name].append((middle - start, end - middle, sent_on_loopback() - before))
            if side.averaged:
                dist.all_reduce(loss)
                loss /= n
            losses[name].append(float(loss))
    rows = {}
    for name, measured in times.items():
        columns = list(zip(*measured[2:]))  # the first steps allocate
        rows[name] = Row(*(statistics.median(c) for c in columns), losses[name])
    return rows


def peaks(rank: int, n: int, strategy: str, compiled: bool) -> dict[str, int]:
    """The largest sum of live tensor bytes in a step on this process, by side.

    What stays between steps (parameters, optimizer state, and the gradient buckets that DDP never frees) is added up;
    what a step needs beyond it is the growth of resident memory while it runs. Large blocks are mapped one by one for
    this, so that the kernel's high-water mark follows the tensors."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "set below"  # which a compile leaves as it is then
    ctypes.CDLL("libc.so.6").mallopt(-3, 2**14)  # M_MMAP_THRESHOLD
    found = {}
    for name, made in makers(rank, n, strategy, compiled).items():
        side = made()
        for _ in range(2):
            side.forward_backward()
            side.update()
        gc.collect()
        state = [t for s in side.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        if hasattr(side.optimizer, "optim"):  # ZeroRedundancyOptimizer shards an optimizer of its own
            state = [t for s in side.optimizer.optim.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        parameters = list(side.module.parameters())
        kept = sum(_local_bytes(t) for t in (*parameters, *state))
        if isinstance(side.module, nn.parallel.DistributedDataParallel):
            kept += sum(_local_bytes(p) for p in parameters if p.requires_grad)
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
        before = _status_bytes("VmRSS")
        for _ in range(2):
            side.forward_backward()
            side.update()
        found[name] = kept + _status_bytes("VmHWM") - before
        del side, state, parameters
    return found


def _local_bytes(tensor: torch.Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage().nbytes()


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {key} in /proc/self/status")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="2,4")
    parser.add_argument("--pairs", default=",".join(PAIRS))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--compile", action="store_true")
    a = parser.parse_args()
    warnings.filterwarnings("ignore")
    print(f"{MODEL}, batch {BATCH} x {SEQ}, fp32, AdamW; sums over the processes, medians of {a.steps} steps")
    print(
        f"{'':12}{'':16}{'fwd+bwd CPU ms':>15}{'optimizer':>11}{'MB sent':>10}{'peak MiB a rank':>17}{'last loss':>11}"
    )
    for n in map(int, a.devices.split(",")):
        print(f"{n} processes")
        for strategy in a.pairs.split(","):
            ranks = gloo.run(n, race, n, strategy, a.steps, a.compile, seconds=1800)
            most = gloo.run(n, peaks, n, strategy, a.compile, seconds=1800)
            total = {}
            for name in ranks[0]:
                rows = [r[name] for r in ranks]
                total[name] = row = Row(
                    sum(r.seconds for r in rows), sum(r.optimizer_seconds for r in rows), rows[0].bytes_,
                    rows[0].losses,
                )  # fmt: skip
                theirs = ADAPTED.get(strategy) or f"torch {PAIRS.get(strategy)}"
                label = {"autopar": "autopar", "compiled": "  torch.compile"}.get(name, theirs)
                peak = f"{max(m[name] for m in most) / 2**20:17.1f}" if name in most[0] else f"{'':17}"
                ratio = f"{row.seconds / total['autopar'].seconds:8.2f}x" if name != "autopar" else ""
                print(
                    f"{strategy if name == 'autopar' else '':12}{label:16}"
                    f"{row.seconds * 1e3:15.1f}{row.optimizer_seconds * 1e3:11.1f}"
                    f"{row.bytes_ / 1e6:10.2f}{peak}{row.losses[-1]:11.5f}{ratio}",
                    flush=True,
                )  # fmt: skip
            apart = max(abs(x - y) for r in total.values() for x, y in zip(r.losses, total["autopar"].losses))
            print(f"{'':12}loss curves apart by at most {apart:.1e}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
