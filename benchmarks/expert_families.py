"""Check mixtures of experts of transformers cut over devices, all ranks simulated: steps in fp64 against the model.

    OMP_NUM_THREADS=1 AUTOPAR_CACHE=off python benchmarks/expert_families.py [NAME ...] [--minutes 9] [--seed 0]

Families are built from tiny configurations with eight experts a layer. Their code rounds to fp32 in norms, routers
and losses, where a sum in another order shows as 1e-7: here fp32 is fp64, so that errors are those of the cutting. A
cell is a family on a mesh under a strategy, with the weights' own routing or one that sends all tokens to the same
experts, with the loss that balances experts or without. Cells come in random order until the minutes are over. Prints
a line a family: how many cells were right (1e-10), in how many rows were sent, the worst error, and why others were
refused. Exit code 1 for a wrong number.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import logging
import random
import sys
import time
import types
import warnings
from collections import Counter, defaultdict
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))

import autopar
from autopar.errors import AutoparError
from tests.families import FAMILIES

NAMES = (
    "mixtral deepseek_v2 deepseek_v3 ernie4_5_moe glm4_moe dots1 flex_olmo gpt_oss granitemoe jetmoe minimax olmoe "
    "phimoe qwen2_moe qwen3_moe dbrx qwen3_next"
).split()
CUTS = [
    ("ep=2", "expert", 1), ("ep=3", "expert", 1), ("ep=4", "expert", 1), ("ep=8", "expert", 1), ("ep=2", "expert", 2),
    ("dp=2,ep=2", "expert", 1), ("dp=2,ep=2", "expert+zero1", 1), ("ep=2,dp=2", "expert+fsdp", 1),
    ("ep=2,tp=2", "expert+megatron", 1), ("ep=2,tp=2", "expert+megatron_sp", 1), ("pp=2,ep=2", "expert", 2),
    ("ep=2,cp=2", "expert+all_gather_kv", 1), ("ep=2,cp=2", "expert+ring", 1),
]  # fmt: skip
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS, BATCH, SEQ, EXACT = 8, 24, 4, 1e-10


class WideTorch(types.ModuleType):
    """torch, with fp64 in the place of fp32."""

    def __getattr__(self, name: str):
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


def built(name: str, same_experts: bool, balanced: bool) -> tuple[nn.Module, dict]:
    """Return a family's model in fp64 and the arguments of a call."""
    torch.manual_seed(0)
    small, given = FAMILIES[name](BATCH, SEQ)
    config = small.config
    for part in (config, getattr(config, "ffn_config", None)):
        for count in COUNTS:
            if part is not None and hasattr(part, count):
                setattr(part, count, EXPERTS)
    if balanced and hasattr(config, "output_router_logits"):
        config.output_router_logits, config.router_aux_loss_coef = True, 0.1
    for module in {type(m).__module__ for m in small.modules()} | {"transformers.integrations.moe"}:
        if module.startswith("transformers."):
            importlib.import_module(module).torch = WideTorch("torch")
    torch.manual_seed(0)
    model = type(small)(config).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # the default grouped product takes no fp64
    for key, p in model.named_parameters():
        if same_experts and p.dim() == 2 and p.shape[0] == EXPERTS and ("gate" in key or "router" in key):
            with torch.no_grad():
                p.copy_(p[:1] * 100 * torch.arange(1, EXPERTS + 1, dtype=p.dtype)[:, None])
    return model, given


def checked(name: str, mesh: str, strategy: str, micro_batches: int, same: bool, balanced: bool):
    """Return (the worst error of a cell, whether rows were sent). Raises AutoparError where it is refused."""
    model, given = built(name, same, balanced)
    report = autopar.verify(model, mesh, given, strategy=strategy, micro_batches=micro_batches, hardware="cpu-gloo")
    return max(report.errors.values()), report.plan.routing is not None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.Tensor.float = torch.Tensor.double
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    bits = (False, True)
    cells = list(itertools.product(args.names, CUTS, bits, bits))
    random.Random(args.seed).shuffle(cells)
    errors, sent, refused = defaultdict(list), Counter(), defaultdict(Counter)
    end = time.monotonic() + 60 * args.minutes
    for name, cut, same, balanced in cells:
        if time.monotonic() > end:
            break
        try:
            error, has_rows = checked(name, *cut, same, balanced)
        except AutoparError as refusal:
            refused[name][f"{cut[1]} on {cut[0]}: {refusal.message.splitlines()[0]}"] += 1
            continue
        errors[name].append(error)
        sent[name] += has_rows
        if error > EXACT:
            print(f"{name} {cut} same_experts={same} balanced={balanced}: {error:.1e}", flush=True)
    wrong = sum(e > EXACT for found in errors.values() for e in found)
    total = sum(map(len, errors.values()))
    print(f"seed {args.seed}: {total - wrong} of {total} cells right to {EXACT:g}, of {len(cells)}")
    print(f"{'family':14s} {'right':>5s} {'sent':>5s} {'worst':>8s} refused")
    for name in args.names:
        right, worst = sum(e <= EXACT for e in errors[name]), max(errors[name], default=0.0)
        print(f"{name:14s} {right:5d} {sent[name]:5d} {worst:8.0e} {sum(refused[name].values())}")
    for name, reasons in refused.items():
        for reason, count in reasons.items():
            print(f"  refused {count}: {name}, {reason}"[:200])
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
