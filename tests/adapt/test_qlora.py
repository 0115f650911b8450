"""QLoRA: what the graph of a quantized base reads, keeps and gathers, what a plan says of it, what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar import AdaptError, LoRA, QLoRA, compiler
from autopar.adapt import order
from autopar.adapt.parse import parse
from autopar.compiler import lower
from autopar.frontend.fake_parameters import forms_of
from autopar.ir.graph import bytes_of, fingerprint
from autopar.models import build
from autopar.passes.distribute.localize import localize

from .quantized_base import Adapted, adapted


def dequantized(graph) -> list:
    return [n for n in graph.nodes if n.target is torch.ops.autopar.dequantize.default]


@pytest.fixture(scope="module")
def llama() -> Adapted:
    return adapted("llama", r=4, target_modules=["q_proj", "v_proj"], block_size=32)


def test_the_weight_is_gone_and_made_again_in_the_backward(llama):
    parameters = {n.meta["role"].name for n in llama.captured.graph.nodes if n.op == "placeholder"}
    assert len(llama.quantized) == 7 and not parameters & llama.quantized.keys()
    assert all(names <= parameters for names in map(set, llama.quantized.values()))
    assert {n.meta["phase"] for n in dequantized(llama.captured.graph)} == {"forward", "backward"}
    for mesh, strategy in (("dp=2", "fsdp"), ("tp=2", "megatron"), ("dp=2", "ddp")):
        plan = llama.plan(mesh, strategy)
        for rank in range(plan.mesh.devices):
            saved = lower(llama.captured, plan, rank).parts.saved
            assert not [name for name in saved if "dequantize" in name]


def test_bf16_dequantizes_to_bf16():
    found = adapted("gpt2", "bf16", r=2, target_modules=["c_attn"])
    weights = dequantized(found.captured.graph)
    assert weights and all(
        n.meta["val"].dtype == torch.bfloat16 and isinstance(n.args[0].meta["role"].name, str) for n in weights
    )


def test_fsdp_gathers_the_packed_weights(llama):
    """(n - 1) / n of their bytes wherever a weight is dequantized: in the forward, and again for every input
    gradient."""
    devices = 4
    plan = llama.plan(f"dp={devices}", "fsdp")
    result = llama.step(plan)
    assert sum(c.wire_bytes for c in plan.collectives) == pytest.approx(sum(result.bytes_sent) / devices)
    weights = dequantized(llama.captured.graph)
    read = [a for n in weights for a in n.all_input_nodes if plan.layouts[a.meta["role"].name] != "R"]
    formula = sum(bytes_of(a.meta["val"]) for a in read) * (devices - 1) / devices
    graph = localize(llama.captured.graph_module, plan.sharding, 0).graph
    gathers = [n.meta["collective"] for n in graph.nodes if "collective" in n.meta]
    counted = sum(c.wire_bytes for c in gathers if c.tensor in {a.name for a in read})
    in_floats = sum(bytes_of(n.meta["val"]) for n in weights) * (devices - 1) / devices
    assert counted == pytest.approx(formula) and counted < 0.16 * in_floats
    assert not [c for c in gathers if "dequantize" in c.tensor]


def test_predicted_bits():
    """The plan's memory differs from LoRA's by what quantization takes off the weights."""
    model, batch = build("llama:hidden=512,layers=1,heads=8,kv_heads=4,ffn=1536,vocab=256,seq=64", batch=2, seq=8)
    held, elements = {}, 0
    for adapt in (LoRA(r=4, target_modules=["q_proj"]), QLoRA(r=4, target_modules=["q_proj"])):
        plan = autopar.plan(model, "dp=2", batch, strategy="ddp", baselines=False, adapt=[adapt], precision="fp32")
        held[adapt.name], elements = plan.memory["parameters"], plan.parameter_elements
    weights = sum(m.weight.numel() for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head")
    bits = 32 - 8 * (held["lora"] - held["qlora"]) / weights
    assert 4.125 < bits <= 4.13
    assert elements == sum(p.numel() for p in model.parameters()) + plan.trained_elements


def test_towers_are_unrolled():
    model, batch = build("mlp:hidden=64,ffn=128,layers=9", batch=2, seq=8)
    adapt = order.checked(QLoRA(r=2))
    with order.attached(model, adapt):
        forms = forms_of(model)
        graphs = [
            trace(model, batch, None, forms, "fp32", adapt).graph for trace in (compiler.trace, compiler.trace_to_plan)
        ]
        assert fingerprint(graphs[0]) == fingerprint(graphs[1])
    assert not [n for n, p in model.named_parameters() if "packed" in n or not p.requires_grad]


REFUSED = {
    "with LoRA": ([LoRA(target_modules=["q_proj"]), QLoRA()], "both lora and qlora"),
    "unknown codes": (dict(quant_type="nf3"), "quant_type='nf3'(.|\n)*nf4"),
    "an odd block": (dict(block_size=33), "block_size=33"),
    "no such layer": (dict(quantize_modules=["q_prj"]), "no module of the model is called 'q_prj'(.|\n)*q_proj"),
    "no such matrix": (dict(quantize_parameters=["expert"]), "no parameter of the model is called 'expert'"),
    "a norm": (dict(quantize_modules=r".*norm"), "linear layers and Conv1D are quantized"),
    "rank above the layer's": (dict(r=500), "r=500 is above the rank"),
    "a layer that trains": (dict(modules_to_save=["q_proj"], target_modules=["v_proj"], quantize_modules=["q_proj"]),
                            "trains"),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_refused(why):
    given, message = REFUSED[why]
    model, _ = build("llama-tiny", batch=2, seq=8)
    before = {n: p.requires_grad for n, p in model.named_parameters()}
    with pytest.raises(AdaptError, match=message):
        order.attach(model, order.checked(given if isinstance(given, list) else [QLoRA(**given)]))
    assert {n: p.requires_grad for n, p in model.named_parameters()} == before


def test_read_from_a_command_line():
    found = parse(QLoRA, "r=2,target_modules=q_proj,quant_type=fp4,double_quant=false,quantize_modules=q_proj+v_proj")
    assert found == QLoRA(r=2, target_modules=["q_proj"], quant_type="fp4", double_quant=False,
                          quantize_modules=["q_proj", "v_proj"])  # fmt: skip
    assert parse(QLoRA, "r=2") == QLoRA(r=2) and QLoRA().target_modules == "all-linear"


class Odd(nn.Module):
    def __init__(self, inputs: int, tied: bool = False):
        super().__init__()
        self.first, self.second = nn.Linear(inputs, 64), nn.Linear(64, 64)
        if tied:
            self.second = nn.Linear(inputs, 64)
            self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x)).square().mean()


def test_blocks_that_do_not_divide():
    model = Odd(100)
    order.attach(model, order.checked([QLoRA(r=2)]))
    assert model.first.weight_absmax.shape == (64, 2) and model.second.weight_absmax.shape == (64, 1)
    with pytest.raises(AdaptError, match="first.weight has 74 inputs(.|\n)*leave it out"):
        order.attach(Odd(74), order.checked([QLoRA(r=2)]))
    with pytest.raises(AdaptError, match="shared with another layer"):
        order.attach(Odd(64, tied=True), order.checked([QLoRA(r=2, quantize_modules=["first"])]))
