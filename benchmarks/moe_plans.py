"""Plans of large mixtures of experts beside the mappings that Megatron publishes for them, priced by the same clock.

    OMP_NUM_THREADS=1 python benchmarks/moe_plans.py [--only mixtral] > benchmarks/results/moe_plans.txt

A mapping is what its source says of the parameters: attention and embeddings cut over tp, experts over the axes of
expert parallelism (and over tp as well where expert-tensor parallelism has its size), stages, micro-batches and
schedule. It is planned twice: "mapping" is the strategy expert+megatron_sp+zero1 with the experts' layouts pinned, so
that linear layers and sequences are cut as Megatron cuts them; "layouts" has all of these layouts pinned and no
strategy, so that everything else is as good as the search finds it, whether Megatron does that or not. autopar plans
the same mesh, micro-batches and schedule with nothing asked for. Models are transformers' own, on the meta
device, in bf16, pointwise ops fused. Batches are ours: one sample a replica and micro-batch. Seconds to plan are those
of one process from the model to the plan, tracing included.

Mixtral 8x22B    256 H100, TP 4, PP 4, EP 8: Megatron-Core's README of 2024
Qwen3-235B-A22B  256 H100, TP 2, PP 8, VP 4, EP 32: Megatron-Bridge, docs/performance-summary.md, 25.11
DeepSeek-V3      1,024 H100, TP 2, PP 8, VP 4, EP 64: Megatron-Bridge, H100 recipes
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    MixtralConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)  # fmt: skip

import autopar
from autopar.errors import AutoparError
from autopar.utils.format import table

SEQ = 4096
GIB = 2**30
MAPPING = "expert+megatron_sp+zero1"  # the strategy
# of Megatron's tensor parallelism: columns of what comes first, rows of what comes last
DENSE = {
    "*q_proj.weight": "tp:S(0)", "*k_proj.weight": "tp:S(0)", "*v_proj.weight": "tp:S(0)", "*o_proj.weight": "tp:S(1)",
    "*q_b_proj.weight": "tp:S(0)", "*kv_b_proj.weight": "tp:S(0)", "*embed_tokens.weight": "tp:S(0)",
    "lm_head.weight": "tp:S(0)",
}  # fmt: skip


def mixtral() -> PretrainedConfig:
    return MixtralConfig(
        vocab_size=32768, hidden_size=6144, intermediate_size=16384, num_hidden_layers=56, num_attention_heads=48,
        num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip


def qwen3() -> PretrainedConfig:
    return Qwen3MoeConfig(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, moe_intermediate_size=1536, num_hidden_layers=94,
        num_attention_heads=64, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
    )  # fmt: skip


@dataclass(frozen=True)
class Mapping:
    """A published mapping. `experts`: the layouts of gate and up, and of down, (experts, out, in)."""

    name: str
    config: Callable[[], PretrainedConfig]
    mesh: str
    micro_batches: int
    schedule: str
    stages_per_rank: int | None
    experts: tuple[str, str]

    @property
    def batch(self) -> int:
        """One sample a replica and micro-batch."""
        sizes = autopar.Mesh.parse(self.mesh).axis_sizes
        return self.micro_batches * sizes["dp"] * sizes.get("ep", 1)

    @property
    def of_experts(self) -> dict[str, str]:
        up, down = self.experts
        return {"*experts.gate_up_proj": up, "*experts.down_proj": down}

    @property
    def pins(self) -> dict[str, str]:
        return DENSE | self.of_experts


MAPPINGS = {
    "mixtral": Mapping(
        "Mixtral 8x22B", mixtral, "pp=4,dp=2,ep=8,tp=4", 16, "1f1b", None, ("ep:S(0) tp:S(1/2)", "ep:S(0) tp:S(2)")
    ),
    "qwen3": Mapping(
        "Qwen3-235B-A22B", qwen3, "pp=8,dp=16,tp=2", 32, "interleaved_1f1b", 4, ("dp:S(0) tp:S(0)",) * 2
    ),
    "deepseek": Mapping(
        "DeepSeek-V3", DeepseekV3Config, "pp=8,dp=64,tp=2", 64, "interleaved_1f1b", 4, ("dp:S(0)", "dp:S(0)")
    ),
}  # fmt: skip


def model_of(mapping: Mapping) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(mapping.config())


def planned(mapping: Mapping, pins: dict[str, str], strategy: str | None = None) -> tuple[autopar.Plan, float, float]:
    """A plan and the seconds that it took, wall and CPU, tracing included."""
    model = model_of(mapping)
    names = [name for name, _ in model.named_parameters()]
    ids = torch.zeros(mapping.batch, SEQ, dtype=torch.long, device="meta")
    start, cpu = time.perf_counter(), time.process_time()
    plan = autopar.plan(
        model, mapping.mesh, {"input_ids": ids, "labels": ids}, hardware="h100", precision="bf16", execution="compiled",
        micro_batches=mapping.micro_batches, schedule=mapping.schedule, stages_per_rank=mapping.stages_per_rank,
        baselines=False, fixes=False, strategy=strategy, pin={k: v for k, v in pins.items() if _names(k, names)},
        report=lambda text: print(f"{mapping.name}: {text}", file=sys.stderr),
    )  # fmt: skip
    return plan, time.perf_counter() - start, time.process_time() - cpu


def _names(pattern: str, names: list[str]) -> bool:
    return any(name.endswith(pattern.removeprefix("*")) for name in names)


def row(name: str, mapping: Mapping, pins: dict[str, str], strategy: str | None = None) -> list[str]:
    try:
        plan, seconds, cpu = planned(mapping, pins, strategy)
    except AutoparError as error:
        return [name, "-", "-", "-", "-", error.message.split(";")[0][:60], ""]
    sent = f"{plan.routing.sent_bytes / GIB:.1f}" if plan.routing else "-"
    return [
        name, f"{plan.step_seconds:.3f}", f"{plan.utilization:.1%}", f"{plan.peak_bytes / GIB:.1f}", sent,
        f"{seconds:.0f}", f"{cpu:.0f}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=MAPPINGS, help="one of the models")
    args = parser.parse_args()
    for name in [args.only] if args.only else MAPPINGS:
        mapping = MAPPINGS[name]
        devices = autopar.Mesh.parse(mapping.mesh).devices
        vp = f" x {mapping.stages_per_rank}" if mapping.stages_per_rank else ""
        print(f"{mapping.name}, {devices} H100, {mapping.mesh}, {mapping.schedule}{vp}, {mapping.micro_batches} "
              f"micro-batches of {mapping.batch // mapping.micro_batches} x {SEQ}")  # fmt: skip
        rows = [row("mapping", mapping, mapping.of_experts, MAPPING), row("layouts", mapping, mapping.pins),
                row("autopar", mapping, {})]  # fmt: skip
        heads = ["plan", "step s", "MFU", "peak GiB", "rows sent GiB", "s to plan", "CPU s"]
        print("\n".join(table(heads, rows)), flush=True)
        print()


if __name__ == "__main__":
    main()
