"""FP8 in plans: codes are gathered in the place of weights, and products take the profile's curves."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

import autopar
from autopar import compiler
from autopar.adapt import order
from autopar.cost.compute import ComputeCost, flops_of
from autopar.cost.product_seconds import product_seconds
from autopar.hardware.profile import load
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.models import registry
from autopar.ops import autopar as ops
from autopar.rules import Strategy

from .planning import make
from .test_bytes import emitted, predicted

LLAMA = "llama:hidden=256,layers=1,heads=4,kv_heads=2,ffn=512,vocab=96"
WEIGHTS = {(256, 256): 2, (128, 256): 2, (512, 256): 2, (256, 512): 1}  # q and o, k and v, gate and up, down
MESH = Mesh.parse("dp=2")


@functools.cache
def graph_of(recipe: str | None, model: str = LLAMA, batch: int = 8, seq: int = 16):
    model, inputs = registry.build(model, batch=batch, seq=seq, device="meta")
    adapt = order.checked([autopar.FP8(recipe)] if recipe else [])
    with order.attached(model, adapt):
        return compiler.trace(model, inputs, precision="bf16", adapt=adapt)


def _gathered(recipe: str | None, phase: str) -> float:
    plan = make(graph_of(recipe), "dp=2", load("h100"), strategy="fsdp", precision="bf16")
    return sum(c.wire_bytes for c in plan.collectives if c.kind == "all_gather" and c.phase == phase)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_bytes_of_gathered_codes(phase):
    """A weight (o, i) sends o i bytes and 4 o i / 128^2 of scales instead of 2 o i, half of them to each of two."""
    elements = sum(o * i * count for (o, i), count in WEIGHTS.items())
    saved = _gathered(None, phase) - _gathered("block", phase)
    assert saved == pytest.approx((2 * elements - (elements + 4 * elements / 128**2)) / 2)


@pytest.mark.parametrize("recipe", ["block", "tensor"])
@pytest.mark.parametrize("mesh, strategy", [("dp=2", "fsdp"), ("dp=2,tp=2", "megatron_sp"), ("dp=2", "zero1")])
def test_predicted_is_emitted(mesh, strategy, recipe):
    graph = graph_of(recipe)
    plan = make(graph, mesh, load("h100"), strategy=strategy, precision="bf16")
    said, sent = predicted(plan), emitted(graph, plan, 0)
    assert {k: round(v) for k, v in said.items()} == {k: round(v) for k, v in sent.items()}


def test_weights_that_no_device_has_a_block_of():
    """Layers of 128 x 128 cannot be cut between blocks: they are gathered as they are, and quantized then."""
    graph = graph_of("block", "mlp:hidden=128,layers=2,ffn=128")
    plan = make(graph, "dp=2", load("h100"), strategy="fsdp", precision="bf16")
    quantized = [n.name for n in graph.graph.nodes if n.target is ops.fp8_blocks.default]
    assert quantized and all(not plan.sharding.nodes[n].outputs[0].sharding_axes for n in quantized)


def _seconds(hardware, node) -> float:
    arguments = [a.meta["val"] for a in node.all_input_nodes]
    whole = Strategy(
        tuple(Layout.replicated(a.dim()) for a in arguments), (Layout.replicated(node.meta["val"].dim()),), ("",), 1
    )
    return ComputeCost(hardware).seconds(node, whole, MESH, 0.0) - hardware.launch_seconds


@pytest.mark.parametrize("recipe, kind", [("block", "fp8_block"), ("tensor", "fp8")])
def test_products_take_the_curve_of_their_kind(recipe, kind):
    """Less the quantization of the first operand, which the graph does by itself."""
    hardware, sizes = load("h100"), (1, 8 * 16, 512, 256)
    alone = replace(hardware.products[kind], row_seconds=0.0, element_seconds=0.0)
    bare = replace(hardware, products={**hardware.products, kind: alone})
    peak = hardware.peak_flops_per_second("fp8")
    expected = product_seconds(bare, np.array([sizes], float), peak, 1, kind, hardware.sustained)[0]
    products = [n for n in graph_of(recipe).graph.nodes if n.target is ops.fp8_linear.default]
    gate = next(n for n in products if n.meta["val"].shape[-1] == 512)
    assert _seconds(hardware, gate) == pytest.approx(expected)
    assert flops_of(gate) == 2 * 8 * 16 * 512 * 256


def test_a_device_without_such_products_multiplies_in_fp32():
    gate = next(n for n in graph_of("block").graph.nodes if n.target is ops.fp8_linear.default)
    hardware, value = load("a100"), gate.meta["val"]
    sizes = np.array([[1, 8 * 16, value.shape[-1], 256]], float)
    expected = product_seconds(hardware, sizes, 19.5e12, 4, "dense", hardware.sustained)[0]
    read = sum(a.meta["val"].numel() for a in gate.all_input_nodes if a.meta["val"].dtype is torch.uint8)
    assert _seconds(hardware, gate) == pytest.approx(max(expected, 8 * read / hardware.reached_memory_bytes_per_second))
