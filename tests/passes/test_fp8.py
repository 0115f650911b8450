"""Models in FP8 under several meshes have the outputs and gradients of the same quantization by hand on one device.

In fp64, as a number that rounds to another code is no rounding error of a sum."""

from __future__ import annotations

from functools import cache
from random import Random

import pytest
import torch
from torch import nn

import autopar
from autopar.adapt import order
from autopar.errors import MicroBatchError
from autopar.hardware.profile import load
from autopar.ir.mesh import Mesh
from autopar.ops import autopar as ops
from autopar.passes.adapt.fp8 import fp8
from autopar.passes.pipeline.micro_batch import micro_batch
from autopar.planner.spmd.plan import make_plan
from autopar.planner.spmd.plan_options import PlanOptions
from autopar.simulate.oracle import global_values, one_device_step
from autopar.simulate.pipeline import simulate_pipeline
from autopar.simulate.step import simulate_step
from tests.helpers import staged
from tests.runtime import tiny

from .adapted import OTHER_OPS, assert_refused_of_other_ops, assert_the_same_again, traced
from .eager_fp8 import eager_fp8

MESHES = {"dp=2": "fsdp", "dp=2,tp=2": "megatron", "x=2,y=2": None}
MORE = {"tp=4": "megatron_sp", "dp=4": "ddp"}  # by default below, with sequences of several blocks


def _planned(captured, mesh: str, strategy: str | None):
    options = PlanOptions(load("cpu-gloo"), strategy=strategy, baselines=False)
    return make_plan(captured, Mesh.parse(mesh), options, "model")


def _error(mine: torch.Tensor, whole: torch.Tensor) -> float:
    return ((mine - whole).norm() / whole.norm().clamp_min(1e-12)).item()


def _targets(graph) -> list[str]:
    return [str(n.target).split(".")[1] for n in graph.nodes if n.op == "call_function" and "fp8" in str(n.target)]


def _check(model, batch, *adapt, meshes=MESHES, note=""):
    model, adapt = model.double(), order.checked(adapt)
    order.attach(model, adapt, "cpu")
    eager = eager_fp8(model)
    loss = _loss(eager, batch)
    loss.backward()
    expected = {name: p.grad for name, p in eager.named_parameters() if p.grad is not None}
    captured = traced(model, batch, adapt)
    values = global_values(captured, model, batch)
    for mesh, strategy in meshes.items():
        step = simulate_step(captured, _planned(captured, mesh, strategy), values)
        assert _error(step.loss, loss) < 1e-6, f"{note} {mesh} {strategy}"
        assert step.gradients.keys() == expected.keys()
        worst = max(_error(step.gradients[n], expected[n]) for n in expected)
        assert worst < 1e-6, f"{note} {mesh} {strategy}: {worst}"
    return captured, step


def _loss(model, batch) -> torch.Tensor:
    out = model(**batch)
    return out if isinstance(out, torch.Tensor) else out.loss


def llama(**options):
    sizes = dict(hidden_size=256, intermediate_size=384, num_attention_heads=4, num_hidden_layers=1)
    return tiny.llama(**(sizes | options))


@cache
def by_recipe(recipe: str):
    """(a small Llama in FP8, its batch, the capture)"""
    model, batch = llama()
    adapt = order.checked(autopar.FP8(recipe))
    order.attach(model, adapt, "cpu")
    return model, batch, traced(model, batch, adapt)


def gpt2(**options):
    return tiny.gpt2(n_layer=1, n_embd=128, **options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("meshes", [MESHES, MORE], ids=" ".join)
@pytest.mark.parametrize("recipe", ["block", "tensor"])
@pytest.mark.parametrize("build", [gpt2, llama])
def test_models(build, recipe, meshes):
    _check(*build(), autopar.FP8(recipe), meshes=meshes)


@pytest.mark.slow
def test_sequences_of_several_blocks_and_uneven_batches():
    """256 tokens are two blocks of a column, which two devices share; 3 samples are not shared evenly."""
    model, batch = llama(batch=3, seq=256, max_position_embeddings=256)
    meshes = {"dp=2": "ddp", "tp=2": "megatron_sp"}
    _check(model, batch, autopar.FP8(), meshes=meshes)


class Layers(nn.Module):
    """Linear layers of random sizes one behind the other, with and without bias."""

    def __init__(self, random: Random, multiple: int):
        super().__init__()
        sizes = [multiple * random.choice((1, 2, 3, 4)) for _ in range(random.randint(2, 4))]
        pairs = zip(sizes, sizes[1:])
        self.layers = nn.ModuleList(nn.Linear(i, o, bias=random.random() < 0.5) for i, o in pairs)
        self.inputs = sizes[0]

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(40))
def test_random_layers(seed):
    random, recipe = Random(seed), ("block", "tensor")[seed % 2]
    torch.manual_seed(seed)
    model = Layers(random, 128 if recipe == "block" else 16)
    tokens = random.choice(((4,), (5,), (2, 128), (3, 256), (2, 130), (2, 2, 6)))
    x = torch.randn(*tokens, model.inputs, dtype=torch.float64)
    mesh = random.choice(("x=2", "x=3", "x=4", "x=2,y=2", "x=2,y=3"))
    meshes = {mesh: random.choice((None, "ddp", "fsdp", "megatron"))}
    _check(model, dict(x=x), autopar.FP8(recipe), meshes=meshes, note=f"seed {seed} {recipe} {tokens}")


def test_what_is_in_the_graph():
    """One quantization of what three layers read, a weight's again in the backward, and no maximum in blocks."""
    counts = {}
    for recipe in ("block", "tensor"):
        targets = _targets(by_recipe(recipe)[2].graph)
        counts[recipe] = {name: targets.count(name) for name in sorted(set(targets))}
    # 7 layers; q, k, v read one tensor, gate and up another, o and down one each: 4
    products = {"fp8_linear": 7, "fp8_linear_dx": 7, "fp8_linear_dw": 7}
    assert counts["block"] == products | {"fp8_blocks": 7 + 7, "fp8_columns": 4 + 7, "fp8_rows": 4 + 7}
    by_tensor = {"fp8_amax": 7 + 4 + 7, "fp8_tensor": 7 + 4 + 7 + 7, "fp8_step": 7 + 4 + 7 + 7}
    assert counts["tensor"] == products | by_tensor


def test_a_largest_value_is_that_of_all_parts():
    model, batch, captured = by_recipe("tensor")
    step = simulate_step(captured, _planned(captured, "dp=2", "ddp"), global_values(captured, model, batch))
    parts = step.programs[0].parts
    found = [
        sum("all_reduce" in str(n.target) and "max" in n.args for n in graph.graph.nodes)
        for graph in (parts.forward, parts.backward)
    ]
    assert found == [4, 7]  # of the inputs, and of the gradients of outputs; no device's part of a weight


def test_mixed_precision_lora_and_a_second_run():
    model, batch = llama()
    adapt = order.checked([autopar.FP8(), autopar.LoRA(r=2, target_modules=["q_proj", "up_proj"])])
    assert [a.name for a in adapt] == ["lora", "fp8"]
    order.attach(model, adapt, "cpu")
    captured = traced(model, batch, adapt, "bf16")
    products = [n for n in captured.graph.nodes if n.target is ops.fp8_linear.default]
    assert len(products) == 7 and all(n.meta["val"].dtype == torch.bfloat16 for n in products)
    assert "fp8_linear_dw" not in _targets(captured.graph)  # the base does not train
    values = global_values(captured, model, batch)
    step = simulate_step(captured, _planned(captured, "dp=2", "fsdp"), values)
    one = one_device_step(captured, values)
    assert step.gradients.keys() == one.gradients.keys() and all("lora_" in n for n in step.gradients)
    assert all(_error(step.gradients[n], one.gradients[n]) < 0.05 for n in one.gradients)
    assert_the_same_again(fp8, model, batch, "autopar.linear_in_fp8.default", 7)


def test_stages_and_micro_batches():
    """Blocks lie within samples, so micro-batches have those of the whole batch; a scale of all of it is not known."""
    model, batch = llama()
    order.attach(model.double(), adapt := order.checked(autopar.FP8()), "cpu")
    case = staged.Case.of(model, batch, wide=False, adapt=adapt)
    plan = staged.plan_of(micro_batch(case.captured, 4), mesh="pp=2,dp=2", schedule="zb_h1", strategy="fsdp")
    case.check(simulate_pipeline(case.captured, plan, case.values), "pp=2,dp=2", 1e-6)
    with pytest.raises(MicroBatchError, match="fp8_tensor needs fp8_amax"):
        micro_batch(by_recipe("tensor")[2], 2)


@pytest.mark.parametrize("target, words", OTHER_OPS)
def test_weights_of_other_ops(target, words):
    assert_refused_of_other_ops(autopar.FP8, 128, target, words)
