"""QLoRA's gradients against PEFT's LoRA on one process, whose base has the dequantized values."""

from __future__ import annotations

import pytest

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


def test_a_stack_of_experts():
    names = ["experts.gate_up_proj", "experts.down_proj"]
    found = adapted(
        "mixtral", target_modules=["q_proj"], r=2, quantize_parameters=names, quant_type="int8", block_size=16
    )
    assert sum(any(name.endswith(n) for n in names) for name in found.quantized) == 2
    loss, gradients = peft_step(found, r=2, target_modules=["q_proj"])
    result = found.step(found.plan("dp=2,tp=2", "auto"))
    for name, wanted in gradients.items():
        assert (result.gradients[name] - wanted).norm() <= 1e-5 * wanted.norm(), name
