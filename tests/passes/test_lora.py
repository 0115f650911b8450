"""The LoRA pass: what it does to bytes, memory and layouts, and with what else of the compiler it goes together."""

from __future__ import annotations

import functools
import random

import pytest
import torch

import autopar
from autopar import LoRA, Mesh, compiler
from autopar.adapt import order
from autopar.codegen.graph_text import graph_text
from autopar.frontend import export
from autopar.frontend.block_lists import repeated_blocks_of
from autopar.frontend.fake_parameters import forms_of
from autopar.hardware.profile import load
from autopar.ir.graph import fingerprint
from autopar.models import build
from autopar.passes.adapt.lora import lora
from autopar.passes.canonicalize.rewrite import canonicalize
from autopar.planner.spmd.plan import make_plan
from autopar.planner.spmd.plan_options import PlanOptions
from autopar.simulate.oracle import global_values, one_device_step
from autopar.simulate.step import plan_and_capture, simulate_step

LLAMA = "llama:hidden=32,layers=2,heads=4,kv_heads=2,ffn=48,vocab=96"


@functools.cache
def usual():
    return adapted()


def adapted(name: str = LLAMA, batch: int = 4, seq: int = 8, precision: str = "fp32", **config):
    """(the model with adapters of random values, its batch, the capture)"""
    torch.manual_seed(1)
    model, inputs = build(name, batch=batch, seq=seq, device="cpu")
    adapt = order.checked([LoRA(**{"target_modules": "all-linear", "r": 3} | config)])
    order.attach(model, adapt, "cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.1)
    return model, inputs, compiler.trace(model, inputs, None, forms_of(model), precision, adapt)


def assert_like_one_device(model, inputs, captured, plan, tolerance: float = 1e-5) -> None:
    values = global_values(captured, model, inputs)
    wanted, found = one_device_step(captured, values), simulate_step(captured, plan, values)
    assert wanted.gradients and found.gradients.keys() == wanted.gradients.keys()
    largest = max(g.norm() for g in wanted.gradients.values())
    for name, gradient in wanted.gradients.items():
        assert (found.gradients[name] - gradient).norm() <= tolerance * max(gradient.norm(), 1e-3 * largest), name


def planned(captured, mesh: str, strategy: str | None = None, **options):
    options = PlanOptions(load("cpu-gloo"), strategy=strategy, baselines=False, **options)
    return make_plan(captured, Mesh.parse(mesh), options, "adapted")


def test_once_is_enough():
    model, inputs = build(LLAMA, batch=4, seq=8, device="cpu")
    order.attach(model, [LoRA(target_modules="all-linear", r=2)])
    exported = export.export(model, inputs)
    canonicalize(exported.graph_module)
    before = graph_text(exported.graph_module)
    once = graph_text(lora(exported, model).graph_module)
    assert once != before and graph_text(lora(exported, model).graph_module) == once


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [2, 4])
def test_only_adapters_are_reduced_and_have_state(devices):
    model, inputs, captured = usual()
    plan = planned(captured, f"dp={devices}", "ddp")
    elements = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert plan.trained_elements == elements and plan.parameter_elements == sum(p.numel() for p in model.parameters())
    assert plan.memory["gradients"] == 4 * elements and plan.memory["optimizer"] == 8 * elements
    backward = sum(c.wire_bytes for c in plan.collectives if c.phase == "backward")
    assert backward == pytest.approx(2 * (devices - 1) / devices * 4 * elements)
    sent = simulate_step(captured, plan, global_values(captured, model, inputs)).bytes_sent
    assert max(sent) == pytest.approx(sum(c.wire_bytes for c in plan.collectives))


def test_layouts_follow_the_base():
    """Column-parallel base: B is cut by rows, as it is. Row-parallel: A is cut by columns, as it is."""
    model, inputs = build("llama:hidden=1024,layers=1,heads=8,kv_heads=8,ffn=4096,vocab=512", batch=8, seq=256)
    pin = {"*.up_proj.weight": "tp:S(0)", "*.gate_proj.weight": "tp:S(0)", "*.down_proj.weight": "tp:S(1)"}
    adapt = [LoRA(r=16, target_modules=["up_proj", "down_proj"])]
    layouts = autopar.plan(
        model, "dp=2,tp=4", inputs, strategy="megatron", pin=pin, baselines=False, adapt=adapt
    ).layouts
    assert layouts["layers.0.mlp.up_proj.lora_B.weight"] == "tp:S(0)", layouts
    assert layouts["layers.0.mlp.down_proj.lora_A.weight"] == "tp:S(1)", layouts


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(4))
def test_any_shapes_and_meshes(seed):
    """Random sizes, uneven too, ranks, meshes and strategies: as on one device."""
    rng = random.Random(seed)
    print(f"seed {seed}")
    heads = rng.choice([2, 3, 4])
    sizes = dict(
        hidden=heads * rng.choice([4, 6]), layers=1, heads=heads, kv_heads=1, ffn=rng.choice([10, 21]), vocab=31
    )
    name = "llama:" + ",".join(f"{k}={v}" for k, v in sizes.items())
    config = dict(
        r=rng.randint(1, 4), lora_alpha=rng.uniform(0.5, 9), use_rslora=rng.random() < 0.5, use_dora=rng.random() < 0.5,
        lora_dropout=rng.choice([0.0, 0.3]),
        target_modules=rng.choice(["all-linear", ["q_proj", "down_proj"], ["v_proj"]]),
        bias=rng.choice(["none", "all"]),
    )  # fmt: skip
    model, inputs, captured = adapted(name, batch=rng.choice([3, 4]), seq=rng.choice([5, 8]), **config)
    mesh = rng.choice(["dp=2,tp=2", "tp=3", "dp=4", "tp=2,dp=3"])
    strategy = rng.choice([None, "ddp", "zero1", "fsdp", "megatron", "megatron_sp"])
    print(name, config, mesh, strategy)
    assert_like_one_device(model, inputs, captured, planned(captured, mesh, strategy))


@pytest.mark.slow
def test_mixed_precision():
    model, inputs, captured = adapted(LLAMA.replace("layers=2", "layers=1"), precision="bf16")
    plan = planned(captured, "dp=2,tp=2", "megatron_sp", precision="bf16")
    assert all(p.dtype == torch.float32 for p in model.parameters())
    products = [
        n for n in captured.graph.nodes if "lora_" in n.meta["module"] and n.target is torch.ops.autopar.linear.default
    ]
    assert products and all(n.meta["val"].dtype == torch.bfloat16 for n in products)
    assert_like_one_device(model, inputs, captured, plan, tolerance=5e-2)


def test_half_precision_base():
    """Adapters of a bf16 model are fp32, and compute in it."""
    torch.manual_seed(0)
    model, inputs = build(LLAMA.replace("layers=2", "layers=1"), batch=4, seq=8, device="cpu")
    model = model.bfloat16()
    order.attach(model, adapt := order.checked([LoRA(target_modules=["q_proj"], r=2)]), "cpu")
    assert {p.dtype for n, p in model.named_parameters() if "lora_" in n} == {torch.float32}
    captured = compiler.trace(model, inputs, None, forms_of(model), "fp32", adapt)
    products = [n for n in captured.graph.nodes if n.meta["module"].endswith(("lora_A", "lora_B"))
                and n.target is torch.ops.autopar.linear.default]  # fmt: skip
    assert products and all(n.meta["val"].dtype == torch.float32 for n in products)


@pytest.mark.slow
def test_recomputation():
    model, inputs, captured = usual()
    plan = planned(captured, "dp=2,tp=2", "megatron", recompute="full")
    assert set(plan.recomputed) == {"layers.0", "layers.1"}
    assert_like_one_device(model, inputs, captured, plan)


@pytest.mark.slow
def test_deep_models_are_unrolled():
    """A plan made of five traced blocks fits the graph of all of them, adapters included."""
    model, inputs = build("mlp:hidden=16,layers=8", batch=4, seq=8)
    adapt = [LoRA(target_modules=["up", "down"], r=2)]
    plan, short = plan_and_capture(
        model, "dp=2", inputs, strategy="ddp", baselines=False, hardware="cpu-gloo", adapt=adapt
    )
    assert repeated_blocks_of(model) is not None
    with order.attached(model, adapt):
        whole = compiler.trace(model, inputs, None, forms_of(model), "fp32", adapt)
    assert fingerprint(short.graph) == fingerprint(whole.graph) == plan.fingerprint


def test_text_of_the_plan_and_whose_it_is():
    _, _, captured = usual()
    plan = planned(captured, "dp=2,tp=2", "fsdp")
    assert "trains " in str(plan) and "layers.*.self_attn.q_proj.lora (x2)" in str(plan)
    model, inputs = build(LLAMA, batch=4, seq=8)
    with pytest.raises(autopar.errors.PlanIncompatible):
        plan.check_fits(compiler.trace(model, inputs).graph, Mesh.parse("dp=2,tp=2"))
