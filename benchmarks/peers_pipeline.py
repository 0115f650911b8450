"""One training step of a Llama of transformers under autopar's pipelines and under torch's own: the same stages,
micro-batches and schedules, in the same gloo processes, the two taking turns step by step.

    OMP_NUM_THREADS=1 python benchmarks/peers_pipeline.py [--devices 2,4] [--schedules gpipe,1f1b] [--steps 12]
    [--profile]

torch's stages are written by hand, as its documentation shows it: slices of the model's layers in a PipelineStage, a
loss function and a schedule. autopar's stages are cut at the same layers. A row is CPU time of forward and backward,
summed over the processes, as a median of the steps (wall time says little on cores that are shared), the most bytes of
live tensors on any rank and on all together (autopar/utils/allocation_tracker.py), and bytes sent from rank to rank.
Losses and gradients are compared; --profile prints where the CPU time of both sides goes on rank 0.
"""

from __future__ import annotations

import argparse
import cProfile
import logging
import pstats
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parent.parent))

import autopar
from autopar import compiler
from autopar.ir.mesh import Mesh
from autopar.passes.pipeline.micro_batch import micro_batch
from autopar.plans.pipeline import Pipeline
from autopar.schedule import make
from autopar.utils.allocation_tracker import Allocations
from tests.helpers import gloo

HIDDEN, LAYERS, FFN, VOCAB, BATCH, SEQ, MICRO_BATCHES = 256, 8, 704, 1024, 16, 64, 8
PEERS = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved_1f1b": "ScheduleInterleaved1F1B",
         "zbv": "ScheduleZBVZeroBubble"}  # fmt: skip


def build() -> tuple[nn.Module, dict]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=SEQ, use_cache=False,
    )  # fmt: skip
    tokens = torch.randint(VOCAB, (BATCH, SEQ))
    return LlamaForCausalLM(config), dict(input_ids=tokens, labels=tokens)


def layers_of(stage: int, stages: int) -> range:
    return range(LAYERS * stage // stages, LAYERS * (stage + 1) // stages)


def plan_for(n: int, names: list[str]) -> dict[str, autopar.Plan]:
    """Return a plan for each schedule, by name, with stages that begin where torch's do."""
    model, inputs = build()
    planned = autopar.plan(model, f"pp={n}", inputs, hardware="cpu-gloo", baselines=False, schedule="gpipe",
                           micro_batches=MICRO_BATCHES, recompute="none")  # fmt: skip
    nodes = micro_batch(compiler.trace(model, inputs), MICRO_BATCHES).captured.graph.nodes
    forward = [node for node in nodes if node.op == "call_function" and node.meta["phase"] == "forward"]
    plans = {}
    for name in names:
        schedule = make(name, n, MICRO_BATCHES)
        starts = [f"model.layers.{layers_of(s, schedule.stages)[0]}." for s in range(1, schedule.stages)]
        cuts = tuple(next(op.name for op in forward if op.meta["module"].startswith(start)) for start in starts)
        pipeline = Pipeline("pp", n, name, MICRO_BATCHES, schedule.stages_per_rank, cuts)
        plans[name] = replace(planned, mesh=Mesh.parse(f"pp={n}"), pipeline=pipeline)
    return plans


class Part(nn.Module):
    """A stage by hand: some layers, before them the embedding and after them the head."""

    def __init__(self, model: nn.Module, stage: int, stages: int):
        super().__init__()
        self.embed = model.model.embed_tokens if stage == 0 else None
        self.layers = nn.ModuleList(model.model.layers[i] for i in layers_of(stage, stages))
        self.rotary = model.model.rotary_emb
        self.norm, self.head = (model.model.norm, model.lm_head) if stage + 1 == stages else (None, None)

    def forward(self, x):
        if self.embed is not None:
            x = self.embed(x)
        positions = torch.arange(x.shape[1], device=x.device)[None]
        tables = self.rotary(x, positions)
        for layer in self.layers:
            x = layer(x, attention_mask=None, position_ids=positions, position_embeddings=tables)
        return x if self.head is None else self.head(self.norm(x))


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1))


@dataclass
class Side:
    """One way to train: `step()` returns the loss where it is known. `parameters`: of this rank, by name."""

    step: Callable[[], torch.Tensor | None]
    parameters: dict[str, nn.Parameter]

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None


def ours(n: int, plan: autopar.Plan) -> Side:
    model, inputs = build()
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("pp",))
    model = autopar.compile(model, mesh, inputs, plan=plan)

    def step():
        loss = model(**inputs).loss
        loss.backward()
        return loss.detach()

    return Side(step, dict(model.named_parameters()))


def peer(rank: int, n: int, name: str) -> Side:
    from torch.distributed import pipelining

    order = make(name, n, MICRO_BATCHES)
    model, inputs = build()
    parts = {s: Part(model, s, order.stages) for s in order.stages_of(rank)}
    stages = [pipelining.PipelineStage(part, s, order.stages, torch.device("cpu")) for s, part in parts.items()]
    schedule = getattr(pipelining.schedules, PEERS[name])
    schedule = schedule(stages[0] if order.stages == n else stages, MICRO_BATCHES, loss_fn=loss_of)
    first, last = 0 in parts, order.stages - 1 in parts
    here = {id(p) for part in parts.values() for p in part.parameters()}

    def step():
        losses: list[torch.Tensor] = []
        arguments = (inputs["input_ids"],) if first else ()
        schedule.step(*arguments, **(dict(target=inputs["labels"], losses=losses) if last else {}))
        return torch.stack(losses).mean().detach() if last else None

    return Side(step, {key: p for key, p in model.named_parameters() if id(p) in here})


class Seen(Allocations):
    """Live tensors, and the bytes that are sent."""

    sent_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.c10d.send.default:
            self.sent_bytes += sum(t.numel() * t.element_size() for t in args[0])
        return super().__torch_dispatch__(func, types, args, kwargs)


@dataclass
class Row:
    """Holds what one process measured of one side."""

    seconds: float
    peak_bytes: int
    sent_bytes: int
    loss: float | None


def race(rank: int, n: int, name: str, plan: autopar.Plan, steps: int, profiled: bool) -> tuple[dict[str, Row], float]:
    """The rows of both sides, and how far their gradients are apart, relative to the largest element of each."""
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    sides = {"autopar": ours(n, plan), "torch": peer(rank, n, name)}
    times: dict[str, list[float]] = {key: [] for key in sides}
    losses, apart = {}, 0.0
    for turn in range(steps + 2):
        for key, side in sides.items():
            dist.barrier()
            start = time.process_time()
            losses[key] = side.step()
            times[key].append(time.process_time() - start)
            dist.barrier()
        if turn == 0:
            apart = max(
                _apart(p.grad, sides["torch"].parameters[k].grad) for k, p in sides["autopar"].parameters.items()
            )
            assert {*sides["autopar"].parameters} == {*sides["torch"].parameters}
        for side in sides.values():
            side.zero_grad()
    rows = {}
    for key, side in sides.items():
        with Seen() as seen:
            seen.hold("parameters", side.parameters.values())
            side.step()
        side.zero_grad()
        loss = losses[key]
        rows[key] = Row(
            statistics.median(times[key][2:]), seen.peak_bytes, seen.sent_bytes, None if loss is None else loss.item()
        )
    if profiled:
        for key, side in sides.items():
            dist.barrier()
            profile = cProfile.Profile(time.process_time)
            for _ in range(3):
                profile.enable()
                side.step()
                profile.disable()
                side.zero_grad()
            if rank == 0:
                print(key)
                pstats.Stats(profile).sort_stats("tottime").print_stats(25)
            dist.barrier()
    return rows, apart


def _apart(mine, other: torch.Tensor) -> float:
    return ((mine.to_local() - other).abs().max() / other.abs().max()).item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="2,4")
    parser.add_argument("--schedules", default=",".join(PEERS))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--profile", action="store_true")
    a = parser.parse_args()
    warnings.filterwarnings("ignore")
    print(f"Llama of transformers: hidden {HIDDEN}, layers {LAYERS}, ffn {FFN}, vocab {VOCAB}; batch {BATCH} x {SEQ}, "
          f"{MICRO_BATCHES} micro-batches, fp32; medians of {a.steps} steps")  # fmt: skip
    heads = ("CPU ms", 9), ("MiB a rank", 11), ("MiB in all", 11), ("MB sent", 9)
    print(f"{'schedule':18}{'':18}" + "".join(f"{head:>{w}}{'':7}" for head, w in heads) + f"{'loss':>9}")
    for n in map(int, a.devices.split(",")):
        names = a.schedules.split(",")
        plans = plan_for(n, names)
        print(f"{n} processes")
        for name in names:
            found = gloo.run(n, race, n, name, plans[name], a.steps, a.profile, seconds=600)
            totals = {}
            for key in ("torch", "autopar"):
                rows = [rows[key] for rows, _ in found]
                loss = next(row.loss for row in reversed(rows) if row.loss is not None)
                columns = [sum(r.seconds for r in rows) * 1e3, max(r.peak_bytes for r in rows) / 2**20,
                           sum(r.peak_bytes for r in rows) / 2**20, sum(r.sent_bytes for r in rows) / 1e6]  # fmt: skip
                totals[key] = columns
                label = "autopar" if key == "autopar" else PEERS[name].removeprefix("Schedule")
                ratio = [
                    f"{x / y:6.2f}x" if key == "autopar" and y else f"{'':7}" for x, y in zip(columns, totals["torch"])
                ]
                cells = "".join(f"{x:{w}.1f}{r}" for x, (_, w), r in zip(columns, heads, ratio))
                print(f"{name if key == 'torch' else '':18}{label:18}{cells}{loss:9.5f}", flush=True)
            print(f"{'':18}gradients apart by at most {max(apart for _, apart in found):.1e}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
