"""A step with looped collectives equals one device's to 1e-10, and sends what it sends without them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import autopar
from autopar import compiler, models
from autopar.codegen.python_code import is_collective
from autopar.frontend.device import move
from autopar.hardware.profile import load
from autopar.ir.graph import output_node, values_of
from autopar.simulate.compare import verify_model, verify_plan
from autopar.simulate.step import plan_and_capture

from ..helpers import kept
from ..helpers.fake_cuda import CUDA, run_on_fakes

GPT = "gpt2-tiny:hidden=48,heads=12,layers=1"
LLAMA = "llama-tiny:hidden=48,heads=12,kv_heads=12,layers=1"
GROUPED = "llama-tiny:hidden=48,heads=12,kv_heads=6,layers=1"
MESHES = ("tp=2", "tp=3", "tp=4", "dp=2,tp=2")


def both(name: str, mesh: str, seq: int, strategy: str = "megatron_sp", least: int = 6, **options):
    """Simulate a step with all loops and one without, and return the plan that has them."""
    model, inputs = models.build(name, batch=4, seq=seq, device="cpu", seed=0)
    options |= dict(strategy=strategy, hardware="cpu-gloo", baselines=False, cache=kept.captures())
    plan, captured = plan_and_capture(model.double(), mesh, inputs, loops="always", **options)
    assert len(plan.sharding.loops) >= least, plan
    looped = verify_plan(captured, plan, model, inputs)
    assert looped.match and max(looped.errors.values()) <= 1e-10, looped
    sharding = replace(plan.sharding, loops=())
    plain = verify_plan(captured, replace(plan, sharding=sharding), model, inputs)
    assert looped.sent_bytes == plain.sent_bytes
    if mesh in ("tp=2", "tp=4") and seq == 12:  # which divide all that moves
        assert looped.sent_bytes[0] == looped.predicted_bytes
    return plan


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [GPT, LLAMA, GROUPED])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("seq", [12, 13, 11])
def test_step(name, mesh, seq):
    both(name, mesh, seq)


@pytest.mark.slow
@pytest.mark.parametrize("mesh, strategy, options", [
    ("dp=2,tp=2", "megatron_sp+fsdp", {}), ("tp=2", "megatron_sp", dict(micro_batches=2)),
    ("tp=2", "megatron_sp", dict(recompute="full")), ("tp=2", "megatron_sp", dict(recompute="selective")),
    ("cp=2,tp=2", "ring+megatron_sp", {}), ("dp=2,tp=2", "megatron_sp+zero1", dict(micro_batches=2)),
])  # fmt: skip
def test_beside_others(mesh, strategy, options):
    both(GROUPED, mesh, 13, strategy, **options)


@pytest.mark.slow
def test_beside_values_on_the_host():
    """Values are sent to the host before loops take the place of the products that make and read them."""
    model, inputs = models.build("gpt:hidden=64,layers=6,heads=4,vocab=64,seq=32", batch=8, seq=32, device="cpu")
    options = dict(hardware=replace(load("h100"), reserve_bytes=0.0), precision="fp32", strategy="megatron_sp+fsdp")
    free = autopar.plan(model, "dp=2,tp=2", inputs, baselines=False, **options).peak_bytes
    options |= dict(loops="always", offload="activations", memory=0.8 * free)
    report = verify_model(model, inputs, "dp=2,tp=2", **options)
    assert report.match and report.plan.sharding.loops and report.plan.saved_on_host.values, report


@pytest.mark.slow
def test_mixed_precision():
    model, inputs = models.build(GROUPED, batch=4, seq=13, device="cpu", seed=0)
    report = verify_model(model, inputs, "tp=3", strategy="megatron_sp", precision="bf16", loops="always")
    assert report.match and report.plan.sharding.loops, report


def test_on_a_gpu():
    """The lowered program runs on fake CUDA tensors, its messages are the ordinary functional collectives."""
    model, inputs = models.build("llama-tiny:layers=1", batch=4, seq=12)
    plan, captured = plan_and_capture(model, "tp=2", inputs, strategy="megatron_sp", loops="always", hardware="h100",
                                      precision="bf16", baselines=False)  # fmt: skip
    move(captured, CUDA)
    parts = compiler.lower(captured, plan, 1, check=True).parts
    for graph_module in (parts.forward, parts.backward):
        run_on_fakes(graph_module)
        messages = [n for n in graph_module.graph.nodes if n.meta.get("collective") and "loop" in n.name]
        assert messages and all(is_collective(n) and n.target.namespace == "_c10d_functional" for n in messages)
    assert all(v.device.type == "cuda" for v in values_of(output_node(parts.forward.graph).args[0][0]))
    assert torch.bfloat16 in {n.meta["val"].dtype for n in messages}
