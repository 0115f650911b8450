"""The net under changes of structure: what the first and the last rank run, and which layouts plans choose, on file.

The graphs are those that `autopar graph --after partition` prints. A change that means to alter them says so by
`pytest tests/codegen/test_lowered_graphs.py --update-golden`, and the diff of the files shows what it did.
"""

from __future__ import annotations

import hashlib

import pytest

from autopar import FakeQuant, LoRA, QLoRA, models
from autopar.codegen import pass_manager
from autopar.compiler import lower, lower_stage, stages_of
from autopar.plans.pipeline import rank_inside
from autopar.simulate.step import plan_and_capture
from tests.helpers import kept

GPT = "gpt:hidden=16,layers=2,heads=4,vocab=32,seq=8"
LLAMA = "llama:hidden=16,layers=1,heads=4,kv_heads=2,ffn=32,vocab=32,seq=8"
MOE = "moe:hidden=16,layers=1,heads=4,kv_heads=2,ffn=24,vocab=32,seq=8,experts=4,active=2"
VIT = "vit:hidden=16,layers=1,heads=4,image=8,patch=4,classes=5"
RESNET = "resnet:depth=10,width=8,image=16,classes=5"
MLP = "mlp:hidden=16,layers=2"
CASES = {  # name: model, mesh, arguments of autopar.plan
    "mlp_fsdp": (MLP, "dp=2", {"strategy": "fsdp"}),
    "gpt_megatron_sp": (GPT.replace("layers=2", "layers=1"), "tp=2", {"strategy": "megatron_sp"}),
    "llama_auto": (LLAMA, "dp=2,tp=2", {}),
    "llama_zero1_bf16": (LLAMA, "dp=3", {"strategy": "zero1", "precision": "bf16"}),
    "mlp_recomputed": (MLP, "dp=2", {"strategy": "ddp", "recompute": "full"}),
    "moe_experts": (MOE, "ep=2", {"strategy": "megatron"}),
    "vit_hsdp": (VIT, "a=2,b=2", {"strategy": "hsdp"}),
    "resnet_ddp": (RESNET, "dp=2", {"strategy": "ddp"}),
    "llama_lora": (LLAMA, "dp=2,tp=2", {"strategy": "megatron", "adapt": [LoRA(r=2, target_modules="all-linear")]}),
    "llama_qlora": (LLAMA, "dp=2", {"strategy": "fsdp", "adapt": [QLoRA(r=2, block_size=16)]}),
    "mlp_fake_quant": (MLP, "tp=2", {"strategy": "megatron", "adapt": [FakeQuant("int8")]}),
    "mlp_accumulated": (MLP, "dp=2", {"strategy": "zero2", "micro_batches": 2}),
    "mlp_offloaded": (
        MLP,
        "dp=2",
        {"strategy": "ddp", "offload": "optimizer", "hardware": "h100", "precision": "fp32"},
    ),
    "gpt_pipeline": (GPT, "pp=2,dp=2", {"schedule": "1f1b", "micro_batches": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_graphs(name, golden):
    """The graphs of the first rank, and those of the last one."""
    model, mesh, options = CASES[name]
    made, inputs = models.build(model, batch=4, seq=4)
    plan, captured = plan_and_capture(made, mesh, inputs, **{"hardware": "cpu-gloo", "baselines": False} | options)
    texts = []

    def watch(result: pass_manager.PassResult) -> None:
        if result.name.startswith("partition"):
            texts.append(pass_manager.text_of(result.subject))

    micro, stages = stages_of(captured, plan) if not plan.pipeline.is_one_program else (None, [])
    with pass_manager.observe(watch):
        for rank in (0, plan.mesh.devices - 1):
            if plan.pipeline.is_one_program:
                lower(captured, plan, rank)
                continue
            at = plan.mesh.coordinate(rank)
            for i in plan.pipeline.stages_of(plan.pipeline.pp_rank_of(at)):
                lower_stage(stages[i], micro, plan, rank_inside(plan.sharding.mesh, at))
    golden("\n".join(texts))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", (GPT, LLAMA, MOE, VIT, MLP), ids=lambda model: model.partition(":")[0])
def test_plans(model, golden):
    """Layouts of parameters and inputs as a hash, with what the step costs to three digits."""
    lines = []
    for mesh, options in (
        ("dp=2,tp=2", {}),
        ("dp=4", {"strategy": "fsdp"}),
        ("a=2,b=3", {"precision": "bf16"}),
        ("pp=2,dp=2", {}),
    ):
        made, inputs = models.build(model, batch=12, seq=8)
        plan = kept.plan(made, mesh, inputs, hardware="h100", baselines=False, **options)
        layouts = "\n".join(f"{name} {layout}" for name, layout in sorted(plan.layouts.items()))
        digest = hashlib.sha256(layouts.encode()).hexdigest()[:12]
        lines.append(f"{model.partition(':')[0]} {mesh} {options}: {digest} {plan.step_seconds:.2e} s")
    golden("\n".join(lines) + "\n")
