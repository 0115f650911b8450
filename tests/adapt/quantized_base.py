"""Small language models with QLoRA on simulated ranks, and PEFT's LoRA on the values that their base has when it is
dequantized."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from autopar import Mesh, QLoRA, compiler
from autopar.adapt import order
from autopar.frontend.export import Captured
from autopar.frontend.fake_parameters import forms_of
from autopar.hardware.profile import load
from autopar.ops.nf4 import dequantize
from autopar.planner.spmd.plan import make_plan
from autopar.planner.spmd.plan_options import PlanOptions
from autopar.plans.plan import Plan
from autopar.simulate.oracle import global_values
from autopar.simulate.step import StepResult, simulate_step

SIZES = dict(vocab_size=96)
MODELS = {
    "gpt2": dict(n_embd=128, n_layer=1, n_head=4, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
                 bos_token_id=0, eos_token_id=0),
    "llama": dict(hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
                  num_key_value_heads=2),
    "mixtral": dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
                    num_key_value_heads=2, num_local_experts=4),
}  # fmt: skip


def language_model(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **MODELS[kind], **SIZES)
    torch.manual_seed(0)
    ids = torch.randint(0, 96, (4, 12))
    return transformers.AutoModelForCausalLM.from_config(config), dict(input_ids=ids, labels=ids)


@dataclass
class Adapted:
    """A traced model on a quantized base, and the same model with the values that its base has when it is
    dequantized."""

    model: nn.Module
    reference: nn.Module
    batch: dict[str, Tensor]
    captured: Captured
    quantized: dict[str, tuple[str, ...]]

    def plan(self, mesh: str, strategy: str) -> Plan:
        options = PlanOptions(load("cpu-gloo"), strategy=strategy, baselines=False)
        return make_plan(self.captured, Mesh.parse(mesh), options, "adapted")

    def step(self, plan: Plan) -> StepResult:
        return simulate_step(self.captured, plan, global_values(self.captured, self.model, self.batch))


def adapted(kind: str, precision: str = "fp32", **config) -> Adapted:
    """With random values in both factors of the adapters, so that no gradient is zero."""
    model, batch = language_model(kind)
    reference, qlora = copy.deepcopy(model), QLoRA(**config)
    attachment = order.attach(model, adapt := order.checked(qlora), "cpu")
    attachment.fill()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.05)
        for name, replaced in attachment.replaced.items():
            parts = [model.get_parameter(n) for n in replaced.names]
            weight = dequantize(*parts, *[None] * (4 - len(parts)), qlora.quant_type, torch.float32)
            is_transposed = "Conv1D" in str(reference.get_submodule(name.rpartition(".")[0]))
            reference.get_parameter(name).copy_(weight.t() if is_transposed else weight)
    captured = compiler.trace(model, batch, None, forms_of(model), precision, adapt)
    return Adapted(model, reference, batch, captured, {n: r.names for n, r in attachment.replaced.items()})


def peft_step(found: Adapted, **config) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of PEFT's LoRA with the same adapters."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(copy.deepcopy(found.reference), peft.LoraConfig(**config))
    names = {
        n: n.removeprefix("base_model.model.").replace(".default", "")
        for n, p in model.named_parameters()
        if p.requires_grad
    }
    with torch.no_grad():
        for name, ours in names.items():
            model.get_parameter(name).copy_(found.model.get_parameter(ours))
    loss = model(**found.batch).loss
    loss.backward()
    return loss.detach(), {ours: model.get_parameter(name).grad for name, ours in names.items()}
