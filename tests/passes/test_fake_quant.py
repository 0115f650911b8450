"""Fake-quantized models under several meshes have the gradients, and the new ranges, of eager torch on one device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.adapt import order
from autopar.hardware.profile import load
from autopar.ir.mesh import Mesh
from autopar.passes.adapt.fake_quant import fake_quant
from autopar.planner.spmd.plan import make_plan
from autopar.planner.spmd.plan_options import PlanOptions
from autopar.simulate.oracle import global_values, one_device_step
from autopar.simulate.step import plan_and_capture, simulate_step
from tests.runtime import tiny

from .adapted import OTHER_OPS, assert_refused_of_other_ops, assert_the_same_again, traced
from .eager_quant import eager_quantized, gradients, observed

FAKE = torch.ops.autopar.fake_quantize.default
MESHES = {"tp=3": "megatron", "dp=4": "fsdp"}  # benchmarks/adapt.py has more


def _planned(captured, mesh: str, strategy: str | None):
    options = PlanOptions(load("cpu-gloo"), strategy=strategy, baselines=False)
    return make_plan(captured, Mesh.parse(mesh), options, "model")


def _error(mine: torch.Tensor, whole: torch.Tensor) -> float:
    return ((mine - whole).norm() / whole.norm().clamp_min(1e-12)).item()


def _check(model, batch, *adapt, meshes=MESHES):
    """Weights alone in fp32; with inputs in fp64, as an input that falls on another point of its grid is no rounding
    error."""
    adapt = order.checked(adapt)
    with_inputs = any(getattr(a, "activations", None) for a in adapt)
    model = model.double() if with_inputs else model
    order.attach(model, adapt, "cpu")
    eager = eager_quantized(model)
    loss = eager(**batch).loss
    loss.backward()
    expected = gradients(eager)
    captured = traced(model, batch, adapt)
    values = global_values(captured, model, batch)
    ranges, one = observed(eager), one_device_step(captured, values).buffers
    for mesh, strategy in meshes.items():
        step = simulate_step(captured, _planned(captured, mesh, strategy), values)
        assert _error(step.loss, loss) < 1e-6
        assert step.gradients.keys() == expected.keys()
        assert max(_error(step.gradients[n], expected[n]) for n in expected) < 1e-5, mesh
        assert step.buffers.keys() == ranges.keys()
        assert all(_error(step.buffers[n], ranges[n]) < 1e-6 for n in ranges)
        assert all(torch.equal(step.buffers[n].float(), one[n].float()) for n in ranges)
    return step


def gpt2():
    return tiny.gpt2(n_layer=1)


def llama():
    return tiny.llama(num_hidden_layers=1)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("build, text", [(gpt2, "int8"), (llama, "int4,group_size=8,mapping_type=asymmetric")])
def test_weights(build, text):
    _check(*build(), autopar.FakeQuant.parse(text))


def test_learned_scales():
    step = _check(*gpt2(), autopar.FakeQuant("int4", group_size=8, range_learning=True))
    scales = [name for name in step.gradients if name.endswith("weight_fake_quantizer.scale")]
    assert len(scales) == 4 and tuple(step.gradients[scales[0]].shape) == (72, 3)


@pytest.mark.slow
def test_tokens_are_quantized_each():
    _check(*gpt2(), autopar.FakeQuant("int4", group_size=8, activations="int8"), meshes={"dp=2,tp=2": "megatron"})


def test_observed_ranges_of_uneven_parts():
    """5 sequences over 2 and 3 devices, which tell each other the largest values of theirs."""
    config = autopar.FakeQuant(activations="int8", activation_granularity="per_tensor")
    step = _check(*tiny.gpt2(batch=5, n_layer=1), config, meshes={"dp=2,tp=2": "megatron", "dp=3": "ddp"})
    nodes = [n for n in step.programs[0].parts.forward.graph.nodes if "all_reduce" in str(n.target) and "max" in n.args]
    assert len(nodes) == 2 * 4  # one for each end of the range of each layer


def test_lora_beside_a_quantized_base():
    model, batch = gpt2()
    lora, quant = autopar.LoRA(r=2, target_modules=["c_attn"]), autopar.FakeQuant("int4", activations="int8")
    adapt = order.checked([quant, lora])
    assert [a.name for a in adapt] == ["lora", "fake_quant"]
    order.attach(model, adapt, "cpu")
    captured = traced(model, batch, adapt)
    counts = [n for n in captured.graph.nodes if n.target is FAKE]
    assert len(counts) == 2 * 4  # a weight and an input for each of the layers, none of the adapters'
    step = simulate_step(captured, _planned(captured, "dp=2,tp=2", "megatron"), global_values(captured, model, batch))
    one = one_device_step(captured, global_values(captured, model, batch))
    assert step.gradients.keys() == one.gradients.keys() and all("lora_" in n for n in step.gradients)
    assert all(_error(step.gradients[n], one.gradients[n]) < 1e-4 for n in one.gradients)


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(12, 8), nn.Linear(8, 3)

    def forward(self, index):
        return self.out(self.words(index)).square().mean()


def test_embeddings_mixed_precision_and_a_second_run():
    model, batch = Embedded(), dict(index=torch.arange(12).view(4, 3))
    adapt = order.checked(autopar.FakeQuant("int4", target_modules=["words", "out"]))
    order.attach(model, adapt, "cpu")
    captured = traced(model, batch, adapt, "bf16")
    quantized = [n for n in captured.graph.nodes if n.target is FAKE]
    assert [n.meta["val"].dtype for n in quantized] == [torch.float32] * 2  # before the cast
    assert_the_same_again(fake_quant, model, batch, "autopar.fake_quantize.default", 2)


class Tall(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(9))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def test_a_plan_of_many_blocks():
    """Traced with some of them, and still the plan of all."""
    model, adapt = Tall(), [autopar.FakeQuant(activations="int8", activation_granularity="per_tensor")]
    plan, unrolled = plan_and_capture(model, "dp=2", (torch.randn(4, 8),), adapt=adapt, baselines=False,
                                      precision="fp32")  # fmt: skip
    with order.attached(model, adapt):
        plan.check_fits(traced(model, (torch.randn(4, 8),), adapt).graph, plan.mesh)
    assert sum(n.target is FAKE for n in unrolled.graph.nodes) == 2 * 9


@pytest.mark.parametrize("target, words", OTHER_OPS)
def test_weights_of_other_ops(target, words):
    assert_refused_of_other_ops(autopar.FakeQuant, 6, target, words)
