"""A step with LoRA on simulated ranks against one process that runs PEFT's own LoRA from the same adapters."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autopar import LoRA, Mesh, compiler
from autopar.adapt import order
from autopar.frontend.export import Captured
from autopar.frontend.fake_parameters import forms_of
from autopar.hardware.profile import load
from autopar.planner.spmd.plan import make_plan
from autopar.planner.spmd.plan_options import PlanOptions
from autopar.simulate.oracle import global_values
from autopar.simulate.step import StepResult, simulate_step
from tests.families import FAMILIES

# family: what of LoRA is tried on it
CASES = {
    "gpt2": dict(target_modules=["c_attn", "c_proj", "wte"]),
    "llama": dict(target_modules="all-linear", use_rslora=True),
    "llama-dora": dict(target_modules=["q_proj", "down_proj"], use_dora=True, modules_to_save=["lm_head"]),
    "bert": dict(target_modules=r".*\.(query|value)", bias="lora_only", modules_to_save=["classifier"]),
    "vit": dict(
        target_modules=["q_proj", "v_proj"], bias="all", rank_pattern={"v_proj": 2}, alpha_pattern={"q_proj": 4}
    ),
    "mixtral": dict(target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]),
}


@dataclass
class Adapted:
    """A traced model with its adapters, and what PEFT computes with them: the loss, gradients and adapters by autopar's
    names."""

    model: nn.Module
    batch: dict[str, Tensor]
    captured: Captured
    loss: Tensor
    gradients: dict[str, Tensor]

    def step(self, mesh: str, strategy: str, precision: str = "fp32") -> StepResult:
        options = PlanOptions(load("cpu-gloo"), strategy=strategy, precision=precision, baselines=False)
        plan = make_plan(self.captured, Mesh.parse(mesh), options, "adapted")
        return simulate_step(self.captured, plan, global_values(self.captured, self.model, self.batch))

    def errors(self, mesh: str, strategy: str) -> dict[str, float]:
        """Relative errors of the loss and of every gradient; the gradients are those of PEFT and no others."""
        result = self.step(mesh, strategy)
        assert result.gradients.keys() == self.gradients.keys()
        largest = max(g.norm().item() for g in self.gradients.values())
        errors = {"loss": ((result.loss - self.loss) / self.loss).abs().item()}
        for name, wanted in self.gradients.items():
            scale = max(wanted.norm().item(), 1e-4 * largest)
            errors[name] = (result.gradients[name] - wanted).norm().item() / scale
        return errors


def ours(name: str) -> str:
    """The name that autopar gives to a parameter of a PeftModel."""
    for part, instead in (
        ("base_model.model.", ""), (".default", ""), ("lora_magnitude_vector.weight", "lora_magnitude_vector"),
        (".modules_to_save", ""),
    ):  # fmt: skip
        name = name.replace(part, instead)
    return name if "lora_" in name else name.replace(".base_layer", "")


def case_of(name: str) -> Adapted:
    """One of CASES, on the family that its name begins with."""
    torch.manual_seed(3)
    return adapted(*FAMILIES[name.partition("-")[0]](4, 12), **CASES[name])


def adapted(model: nn.Module, batch: dict[str, Tensor], **config) -> Adapted:
    """`model` gets adapters of random values (both factors, so that no gradient is zero) and stays adapted."""
    import peft

    config = {"lora_alpha": 12, "r": 4} | config
    base = copy.deepcopy(model)
    adapt = order.checked([LoRA(**config)])
    order.attach(model, adapt, "cpu")
    added = {n: p for n, p in model.named_parameters() if "lora_" in n}
    with torch.no_grad():
        for name, parameter in added.items():
            if "magnitude" not in name:
                parameter.normal_(std=0.05)
    captured = compiler.trace(model, batch, None, forms_of(model), "fp32", adapt)
    reference = peft.get_peft_model(base, peft.LoraConfig(**_listed(config)))
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "lora_" in name:
                parameter.copy_(added[ours(name)])
    loss = reference(**batch).loss
    loss.backward()
    gradients = {ours(n): p.grad for n, p in reference.named_parameters() if p.requires_grad}
    return Adapted(model, batch, captured, loss.detach(), gradients)


def _listed(config: dict) -> dict:
    return {k: list(v) if isinstance(v, Sequence) and not isinstance(v, str) else v for k, v in config.items()}
