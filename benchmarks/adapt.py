"""Adapted models on simulated ranks against one process: LoRA against PEFT's own from the same adapters, fake
quantization against torch's own ops in eager mode. The largest relative error of the loss and of every gradient.

    OMP_NUM_THREADS=1 python benchmarks/adapt.py [--lora CASE,...] [--quant FAMILY,...]

Exit code 1 for an error above 1e-5.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from autopar import FakeQuant, Mesh, compiler
from autopar.adapt import order
from autopar.frontend.fake_parameters import forms_of
from autopar.hardware.profile import load
from autopar.planner.spmd.plan import make_plan
from autopar.planner.spmd.plan_options import PlanOptions
from autopar.simulate.oracle import global_values
from autopar.simulate.step import simulate_step
from tests.adapt.against_peft import CASES, case_of
from tests.families import FAMILIES
from tests.passes.eager_quant import eager_quantized

RUNS = (("dp=2,tp=2", "auto"), ("dp=2,tp=2", "megatron_sp"), ("tp=3", "auto"), ("tp=3", "megatron"), ("dp=4", "fsdp"))
QUANTIZED = ("gpt2", "llama", "bert", "vit", "mixtral")
# With rounded inputs in fp64: there an input that falls on another point of its grid is no rounding error.
GRIDS = ("int8", "int4,group_size=8,range_learning=true", "int8,activations=int8")
TOLERANCE = 1e-5


def quantized(family: str, text: str) -> list[float]:
    """The errors of one grid on a family, by run."""
    torch.manual_seed(3)
    model, batch = FAMILIES[family](4, 12)
    if "activations" in text and family != "mixtral":  # torch has no grouped product in fp64
        model, batch = model.double(), {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    adapt = order.checked([FakeQuant.parse(text)])
    order.attach(model, adapt, "cpu")
    eager = eager_quantized(model)
    loss = eager(**batch).loss
    loss.backward()
    wanted = {name: p.grad for name, p in eager.named_parameters() if p.grad is not None}
    floor = 1e-4 * max(g.norm() for g in wanted.values())
    captured = compiler.trace(model, batch, None, forms_of(model), "fp32", adapt)
    values, errors = global_values(captured, model, batch), []
    for mesh, strategy in RUNS:
        plan = make_plan(
            captured, Mesh.parse(mesh), PlanOptions(load("cpu-gloo"), strategy=strategy, baselines=False), family
        )
        step = simulate_step(captured, plan, values)
        assert step.gradients.keys() == wanted.keys(), step.gradients.keys() ^ wanted.keys()
        found = [(step.gradients[n] - g).norm() / g.norm().clamp_min(floor) for n, g in wanted.items()]
        errors.append(max(float(x) for x in (*found, (step.loss - loss).abs() / loss.abs())))
    return errors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lora", default=",".join(CASES))
    parser.add_argument("--quant", default=",".join(QUANTIZED))
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    print(f"{'':48}" + "".join(f"{f'{mesh} {strategy}':>22}" for mesh, strategy in RUNS))
    worst = 0.0

    def row(name: str, errors: list[float]) -> None:
        nonlocal worst
        worst = max(worst, *errors)
        print(f"{name:48}" + "".join(f"{error:22.1e}" for error in errors), flush=True)

    for case in filter(None, args.lora.split(",")):
        found = case_of(case)
        row(f"LoRA {case}", [max(found.errors(mesh, strategy).values()) for mesh, strategy in RUNS])
    for family in filter(None, args.quant.split(",")):
        for text in GRIDS:
            row(f"{family} {text}", quantized(family, text))
    return worst > TOLERANCE


if __name__ == "__main__":
    sys.exit(main())
