"""FLOPs by formula against torch's own counter, and the roofline on local shapes."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from autopar import api
from autopar.cost.compute import FREE, ComputeCost, flops_of, fraction, fused_inputs, is_pointwise
from autopar.graph import is_op
from autopar.hardware import Hardware, Tier, load
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.models import registry

aten, autopar = torch.ops.aten, torch.ops.autopar
MACHINE = Hardware("toy", "", "", {"fp32": 1e12, "bf16": 4e12}, 0.5, 1e11, 0.5, 10**12, 1e-6,
                   (Tier("link", None, 1e-6, 1e9, 2**20),), "native")  # fmt: skip


@functools.cache
def nodes(model: str):
    graph = api.trace(*registry.build(model, batch=2, seq=16, device="meta")).graph
    return [n for n in graph.nodes if is_op(n)]


def only(model: str, target):
    return next(n for n in nodes(model) if n.target is target)


@pytest.mark.parametrize("model", ["mlp:hidden=16,layers=2", "gpt:hidden=32,layers=2,heads=4,vocab=64,seq=16",
                                   "llama:hidden=32,layers=2,heads=4,kv_heads=2,ffn=64,vocab=64"])  # fmt: skip
def test_flops_of_a_step(model):
    """torch counts attention without the causal half and with the math kernel's four products backward, so it is left out."""
    module, inputs = registry.build(model, batch=2, seq=16, device="cpu")
    with FlopCounterMode(display=False) as counter:
        module(**inputs).loss.backward()
    products = {k: v for k, v in counter.get_flop_counts()["Global"].items() if "attention" not in str(k)}
    attention = (autopar.attention.default, autopar.attention_bw.default)
    # the first layer's input is data in the MLP, embeddings elsewhere: both count alike
    assert sum(flops_of(n) for n in nodes(model) if n.target not in attention) == sum(products.values())


def test_attention_flops():
    """2 b h s t d for each product: two forward, five backward, half under a causal mask; grouped heads count as queries'."""
    b, h, s, d = 2, 4, 16, 8
    model = "llama:hidden=32,layers=2,heads=4,kv_heads=2,ffn=64,vocab=64"
    assert flops_of(only(model, autopar.attention.default)) == 2 * 2 * b * h * s * s * d / 2
    assert flops_of(only(model, autopar.attention_bw.default)) == 5 * 2 * b * h * s * s * d / 2


def test_roofline():
    """max(FLOPs / speed, bytes / bandwidth) + launch, at the speeds that are reached."""
    node, cost = only("mlp:hidden=16,layers=2", autopar.linear.default), ComputeCost(MACHINE)
    assert cost.seconds(node, 1e9, 1, 0) == pytest.approx(1e9 / 0.5e12 + 1e-6)
    assert cost.seconds(node, 1e9, 4, 0) == pytest.approx(1e9 / 4 / 0.5e12 + 1e-6)
    assert cost.seconds(node, 1.0, 1, 1e8) == pytest.approx(1e8 / 0.5e11 + 1e-6)
    assert cost.seconds(node, 1e9, 4, 1e3) < cost.seconds(node, 1e9, 2, 1e3)


def test_views_are_free():
    for node in nodes("gpt:hidden=32,layers=2,heads=4,vocab=64,seq=16"):
        if node.target in FREE:
            assert ComputeCost(MACHINE).seconds(node, 0.0, 1, 1e9) == 0.0


def test_pointwise_chains_share_a_launch_and_skip_memory():
    """relu and pow after each other are one kernel; the first op of a chain pays the launch."""
    graph = torch.fx.Graph()
    mode = torch._subclasses.FakeTensorMode()
    with mode:
        value = torch.empty(8, 8)
    x = graph.placeholder("x")
    chain = [x]
    for target in (aten.relu.default, aten.neg.default, aten.exp.default):
        chain.append(graph.call_function(target, (chain[-1],)))
    for node in chain:
        node.meta["val"] = value
    first, second, third = chain[1:]
    cost = ComputeCost(MACHINE)
    assert [fused_inputs(n) for n in (first, second, third)] == [[False], [True], [True]]
    assert cost.seconds(first, 0, 1, 0) == pytest.approx(1e-6) and cost.seconds(second, 0, 1, 0) == 0
    graph.call_function(aten.sum.default, (first,))  # a second reader: the value must reach memory
    assert fused_inputs(second) == [False] and is_pointwise(second)


def test_speed_follows_the_type():
    graph = torch.fx.Graph()
    node = graph.call_function(aten.mm.default, (graph.placeholder("a"), graph.placeholder("b")))
    with torch._subclasses.FakeTensorMode():
        seconds = {}
        for dtype in (torch.float32, torch.bfloat16):
            node.meta["val"] = torch.empty(4, 4, dtype=dtype)
            seconds[dtype] = ComputeCost(MACHINE).seconds(node, 1e12, 1, 0)
    assert seconds[torch.float32] == pytest.approx(2.0, rel=1e-5) and seconds[torch.bfloat16] == pytest.approx(0.5, rel=1e-5)


def test_fraction_counts_all_axes():
    mesh = Mesh.parse("a=2,b=3")
    assert fraction(Layout.parse("R", 2), mesh) == 1
    assert fraction(Layout.parse("a:S(0) b:S(1)", 2), mesh) == pytest.approx(1 / 6)
    assert fraction(Layout.parse("a:P b:S(1)", 2), mesh) == pytest.approx(1 / 3)


def test_a_large_model_takes_about_six_flops_a_parameter_and_token():
    """Kaplan et al., arXiv 2001.08361, section 2.1: 6 N for each token, and attention on top."""
    model, inputs = registry.build("llama3-8b:layers=2", batch=1, seq=1024, device="meta")
    graph = api.trace(model, inputs).graph
    counted = sum(flops_of(n) for n in graph.nodes if is_op(n) and "attention" not in str(n.target))
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() > 1 and "embed" not in name)
    assert counted == pytest.approx(6 * matrices * 1024, rel=1e-9)
    assert load("h100").reached_flops_per_second("bf16") < 989e12
