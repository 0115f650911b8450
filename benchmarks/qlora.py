"""Show what QLoRA takes: bits a weight, bytes gathered in a step and memory, next to whole training and to LoRA.

    OMP_NUM_THREADS=1 python benchmarks/qlora.py [--model llama3-8b] [--mesh dp=8] [--batch 8] [--seq 2048]

Planned for H100s on a model without values, fully sharded. Bits are those of the quantized layers, all linear ones but
the head, which is gathered in bf16 like the embedding.
A smaller model of the same kind is run on simulated ranks besides: the bytes that they send are those of its plan.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

import autopar
from autopar import models
from autopar.adapt import order
from autopar.compiler import trace
from autopar.frontend.fake_parameters import forms_of
from autopar.hardware.profile import load
from autopar.ops.nf4 import dequantize, quantize
from autopar.planner.spmd.plan import make_plan
from autopar.planner.spmd.plan_options import PlanOptions
from autopar.simulate.oracle import global_values
from autopar.simulate.step import simulate_step

SMALL = "llama:hidden=512,layers=2,heads=8,kv_heads=4,ffn=1024,vocab=512,seq=64"
LORA = autopar.LoRA(r=16, target_modules="all-linear")
WAYS = {  # name: precision, adaptations
    "whole, fp32": ("fp32", []),
    "whole, bf16": ("bf16", []),
    "LoRA, bf16": ("bf16", [LORA]),
    "QLoRA nf4, bf16": ("bf16", [autopar.QLoRA(r=16)]),
    "QLoRA nf4, scales in fp32": ("bf16", [autopar.QLoRA(r=16, double_quant=False)]),
    "QLoRA int8, bf16": ("bf16", [autopar.QLoRA(r=16, quant_type="int8")]),
}


def bits(model, adapt, precision: str) -> float:
    """Return the bits of a weight of the quantized layers, where it is gathered."""
    with order.attached(model, order.checked(adapt)) as attachment:
        forms = {name: p for name, p in model.named_parameters()}
        held = sum(forms[n].numel() * forms[n].element_size() for r in attachment.replaced.values() for n in r.names)
        weights = sum(forms[name].numel() for name in attachment.replaced)
    return 8 * held / weights if weights else 32 if precision == "fp32" else 16


def table(name: str, mesh: str, batch: int, seq: int) -> None:
    print(f"{name} on {mesh}, batch {batch}, {seq} tokens, strategy fsdp; a device, GiB = 2**30 bytes\n")
    print(f"{'':26}  bits  gathered  parameters  gradients, optimizer  activations    peak  ms a step")
    for way, (precision, adapt) in WAYS.items():
        model, inputs = models.build(name, batch=batch, seq=seq)
        options = dict(precision=precision, adapt=adapt, strategy="fsdp", baselines=False, memory="1TiB")
        plan = autopar.plan(model, mesh, inputs, **options)
        gathered = sum(c.wire_bytes for c in plan.collectives if c.kind == "all_gather")
        memory = {
            key: plan.memory.get(key, 0.0) / 2**30 for key in ("parameters", "gradients", "optimizer", "activations")
        }
        print(
            f"{way:26} {bits(model, adapt, precision):5.4g}  {gathered / 2**30:8.2f}  {memory['parameters']:10.3f}  "
            f"{memory['gradients'] + memory['optimizer']:20.3f}  {memory['activations']:11.3f}  "
            f"{plan.peak_bytes / 2**30:6.2f}  {plan.step_seconds * 1e3:9.1f}", flush=True,
        )  # fmt: skip


def simulated() -> None:
    """Bytes sent by a rank in a step on dp=4: of the plan, and counted by the simulator."""
    print(f"\n{SMALL} on dp=4, simulated; bytes sent by a rank in a step\n")
    print(f"{'':26}    planned    counted")
    for way, (precision, adapt) in WAYS.items():
        model, inputs = models.build(SMALL, batch=4, seq=16, device="cpu")
        attachment = order.attach(model, checked := order.checked(adapt), "cpu")
        attachment.fill()
        captured = trace(model, inputs, None, forms_of(model), precision, checked)
        plan = make_plan(captured, autopar.Mesh.parse("dp=4"),
                         PlanOptions(load("cpu-gloo"), strategy="fsdp", precision=precision,
                                                                           baselines=False), SMALL)  # fmt: skip
        result = simulate_step(captured, plan, global_values(captured, model, inputs))
        print(
            f"{way:26} {sum(c.wire_bytes for c in plan.collectives):10.0f} {max(result.bytes_sent):10.0f}", flush=True
        )


def rounding() -> None:
    """Print how far a normal weight is off when it comes back."""
    print("\nnormal weights (4096, 4096): root of the mean squared error over that of the weights\n")
    weight = torch.randn(4096, 4096, generator=torch.Generator().manual_seed(0))
    for quant_type in ("nf4", "fp4", "int8"):
        for double_quant in (False, True):
            parts = quantize(weight, quant_type, 64, double_quant)
            found = dequantize(
                *(parts.get(p) for p in ("packed", "absmax", "scale", "offset")), quant_type, torch.float32
            )
            held = 8 * sum(p.numel() * p.element_size() for p in parts.values()) / weight.numel()
            error = ((found - weight).square().mean() / weight.square().mean()).sqrt().item()
            print(f"{quant_type:5} {'doubly' if double_quant else 'once':7} {held:6.3f} bits  {error:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--mesh", default="dp=8")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=2048)
    args = parser.parse_args()
    table(args.model, args.mesh, args.batch, args.seq)
    simulated()
    rounding()


if __name__ == "__main__":
    main()
