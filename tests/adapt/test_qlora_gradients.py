"""QLoRA's gradients against PEFT's LoRA on one process, whose base has the dequantized values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.ops import autopar

from .quantized_base import adapted, peft_step

GPT2 = "gpt2", dict(r=4, lora_alpha=8, target_modules=["c_attn", "c_proj"]), dict(block_size=32)
CASES = [  # model, adapters, base, meshes and strategies
    (*GPT2, [("dp=2,tp=2", "megatron"), ("dp=2", "auto"), ("tp=3", "megatron")]),
    (*GPT2, [("dp=2,tp=2", "auto"), ("dp=4", "fsdp")]),
    ("llama", dict(r=4, lora_alpha=12, target_modules=["q_proj", "v_proj", "down_proj"]),
     dict(block_size=16, quant_type="fp4"), [("dp=2,tp=2", "megatron"), ("tp=3", "auto"), ("dp=4", "fsdp")]),
]  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind, config, options, runs", CASES)
def test_gradients_are_those_of_peft_on_the_dequantized_base(kind, config, options, runs):
    found = adapted(kind, **config, **options)
    loss, gradients = peft_step(found, **config)
    for mesh, strategy in runs:
        result = found.step(found.plan(mesh, strategy))
        assert result.gradients.keys() == gradients.keys()
        assert abs(result.loss - loss) <= 1e-5 * loss
        for name, wanted in gradients.items():
            assert (result.gradients[name] - wanted).norm() <= 1e-5 * wanted.norm(), (mesh, strategy, name)


@pytest.mark.parametrize("hot", [0, 1, 3])
def test_a_stack_of_experts(hot):
    """Also of experts that are cut, of which hot ones are copied as they compute, dequantized."""
    names = ["experts.gate_up_proj", "experts.down_proj"]
    found = adapted(
        "mixtral", target_modules=["q_proj"], r=2, quantize_parameters=names, quant_type="int8", block_size=16
    )
    assert sum(any(name.endswith(n) for n in names) for name in found.quantized) == 2
    loss, gradients = peft_step(found, r=2, target_modules=["q_proj"])
    plan = found.plan("ep=2", "expert") if hot else found.plan("dp=2,tp=2", "auto")
    result = found.step(replace(plan, hot_experts=hot))
    if hot:
        targets = [node.target for node in result.programs[0].local.graph.nodes]
        assert autopar.copies_of.default in targets and autopar.added_to_owners.default not in targets
    for name, wanted in gradients.items():
        assert (result.gradients[name] - wanted).norm() <= 1e-5 * wanted.norm(), name
