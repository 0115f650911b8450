"""FLOPs by formula against torch's own counter, and the roofline on local shapes."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from autopar import compiler, rules
from autopar.cost.compute import (
    COMPILED,
    FREE,
    GAP_SECONDS,
    ComputeCost,
    _local_shape,
    flops_of,
    fraction,
    fused_inputs,
    is_pointwise,
)
from autopar.cost.products import PRODUCTS, shapes_of
from autopar.hardware.profile import Attention, Hardware, Tier, load
from autopar.ir.graph import is_op, tensor_arguments, values_of
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.models import registry
from tests.helpers.work import counted

aten, autopar = torch.ops.aten, torch.ops.autopar
MACHINE = Hardware("toy", "", "", {"fp32": 1e12, "bf16": 4e12}, 0.5, 1e11, 0.5, 10**12, 1e-6,
                   (Tier("link", None, 1e-6, 1e9, 2**20),), "native")  # fmt: skip

LLAMA = "llama:hidden=32,layers=2,heads=4,kv_heads=2,ffn=64,vocab=64"


@functools.cache
def nodes(model: str):
    graph = compiler.trace(*registry.build(model, batch=2, seq=16, device="meta")).graph
    return [n for n in graph.nodes if is_op(n)]


def only(model: str, target):
    return next(n for n in nodes(model) if n.target is target)


@pytest.mark.parametrize("model", ["mlp:hidden=16,layers=2", "gpt:hidden=32,layers=2,heads=4,vocab=64,seq=16",
                                   LLAMA])  # fmt: skip
def test_flops_of_a_step(model):
    """torch counts attention without the causal half and with the math kernel's four products backward, so it is left
    out."""
    module, inputs = registry.build(model, batch=2, seq=16, device="cpu")
    with FlopCounterMode(display=False) as counter:
        module(**inputs).loss.backward()
    products = {k: v for k, v in counter.get_flop_counts()["Global"].items() if "attention" not in str(k)}
    attention = (autopar.attention.default, autopar.attention_bw.default)
    # the first layer's input is data in the MLP, embeddings elsewhere: both count alike
    assert sum(flops_of(n) for n in nodes(model) if n.target not in attention) == sum(products.values())


def test_attention_flops():
    """2 b h s t d for each product: two forward, five backward, half under a causal mask; grouped heads count as
    queries'."""
    b, h, s, d = 2, 4, 16, 8
    model = LLAMA
    assert flops_of(only(model, autopar.attention.default)) == 2 * 2 * b * h * s * s * d / 2
    assert flops_of(only(model, autopar.attention_bw.default)) == 5 * 2 * b * h * s * s * d / 2


def strategies(node, mesh: Mesh) -> dict[str, rules.Strategy]:
    """Return the strategies of an op by their text, such as "a:m"."""
    shapes = [tuple(a.meta["val"].shape) for a in tensor_arguments(node)]
    outputs = [tuple(v.shape) for v in values_of(node)]
    return {s.text(mesh): s for s in rules.strategies(rules.rule_of(node), shapes, outputs, mesh)}


def price(node, cost: ComputeCost, local_bytes: float = 0.0, strategy: str = "replicated", mesh: str = "a=2") -> float:
    mesh = Mesh.parse(mesh)
    return cost.seconds(node, strategies(node, mesh)[strategy], mesh, local_bytes)


def product(rows: int, depth: int, columns: int, dtype=torch.float32, target=aten.mm.default):
    """A node that multiplies two matrices."""
    graph = torch.fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    node = graph.call_function(target, (a, b))
    with torch._subclasses.FakeTensorMode():
        a.meta["val"], b.meta["val"] = torch.empty(rows, depth, dtype=dtype), torch.empty(depth, columns, dtype=dtype)
        node.meta["val"] = torch.empty(rows, columns, dtype=dtype)
    return node


def test_roofline():
    """max(FLOPs / speed, bytes / bandwidth) + launch, at the speeds that are reached; a CPU has no waves."""
    node, cost = product(1000, 1000, 500), ComputeCost(MACHINE)
    assert price(node, cost) == pytest.approx(1e9 / 0.5e12 + 1e-6)
    assert price(node, cost, 1e8) == pytest.approx(max(2e-3, 1e8 / 0.5e11) + 1e-6)
    assert price(node, cost, 1e10) == pytest.approx(1e10 / 0.5e11 + 1e-6)
    whole = price(node, cost)
    for name, strategy in strategies(node, Mesh.parse("a=4")).items():
        assert cost.seconds(node, strategy, Mesh.parse("a=4"), 0.0) - 1e-6 == pytest.approx(
            (whole - 1e-6) / strategy.ways
        ), name


def test_the_largest_shard_counts():
    """A device holds at most 251 of 1001 rows over 4 devices."""
    node, mesh = product(1001, 1000, 500), Mesh.parse("a=4")
    by_rows = next(s for s in strategies(node, mesh).values() if s.inputs[0].dims[0] == ("a",))
    assert ComputeCost(MACHINE).seconds(node, by_rows, mesh, 0.0) == pytest.approx(251 * 1e6 / 0.5e12 + 1e-6)


def test_views_are_free():
    for node in nodes("gpt:hidden=32,layers=2,heads=4,vocab=64,seq=16"):
        if node.target in FREE:
            assert ComputeCost(MACHINE).seconds(node, None, Mesh.parse("a=2"), 1e9) == 0.0


def test_pointwise_chains_share_a_launch_and_skip_memory():
    """Compiled, relu and neg after each other are one kernel, and the first op of a chain pays the gap; op by op all
    pay a launch."""
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
    eager = ComputeCost(MACHINE)
    assert price(first, eager) == price(second, eager) == price(third, eager) == pytest.approx(1e-6)
    cost = ComputeCost(MACHINE, COMPILED)
    assert [fused_inputs(n) for n in (first, second, third)] == [[False], [True], [True]]
    assert price(first, cost) == pytest.approx(GAP_SECONDS) and price(second, cost) == 0
    graph.call_function(aten.sum.default, (first,))  # a second reader: the value must reach memory
    assert fused_inputs(second) == [False] and is_pointwise(second)


def test_speed_follows_the_type():
    seconds = {
        dtype: price(product(1000, 1000, 500, dtype), ComputeCost(MACHINE)) for dtype in (torch.float32, torch.bfloat16)
    }
    assert seconds[torch.float32] == pytest.approx(2e-3, rel=1e-2) and seconds[torch.bfloat16] == pytest.approx(
        0.5e-3, rel=1e-2
    )


@pytest.mark.parametrize("model", [LLAMA, "mlp:hidden=16,layers=2"])
def test_every_product_has_its_flops(model):
    """Any strategy multiplies the FLOPs of the op over the ways, unless shards are uneven."""
    mesh, compared = Mesh.parse("a=2,b=2"), 0
    for node in nodes(model):
        if node.target not in PRODUCTS:
            continue
        for strategy in strategies(node, mesh).values():
            layouts = (*strategy.inputs, *strategy.outputs)
            local = [_local_shape(shape, layout, mesh.axis_sizes) for shape, layout in zip(shapes_of(node), layouts)]
            flops = sum(2 * math.prod(p) for p in PRODUCTS[node.target](*local))
            assert flops == pytest.approx(flops_of(node) / strategy.ways), (node, strategy.text(mesh))
            compared += 1
    assert compared > 60


def test_the_backward_follows_from_its_ops():
    """Products: the gradients of input and weight cost what the forward does, at their own shapes; attention: 5
    products for 2, slower; one start less to pay."""
    cost, model = ComputeCost(load("h100")), "llama:hidden=4096,layers=1,heads=32,kv_heads=32,ffn=8192,vocab=128"
    found = [
        n for n in compiler.trace(*registry.build(model, batch=4, seq=2048, device="meta")).graph.nodes if is_op(n)
    ]

    def seconds(target) -> float:
        return sum(price(n, cost) for n in found if n.target is target)

    forward = seconds(autopar.linear.default)
    assert seconds(autopar.linear_dx.default) == pytest.approx(forward, rel=0.15)
    assert seconds(autopar.linear_dw.default) == pytest.approx(forward, rel=0.15)
    ratio = seconds(autopar.attention_bw.default) / seconds(autopar.attention.default)
    assert 2.5 < ratio < 2.5 / cost.hardware.attention["cudnn"].backward


def _seconds_without_kernel(cost: ComputeCost, dtype, target, softcap=0.0, drops=False) -> float:
    """Return the seconds of a causal attention of 2 x 8 heads of 64 and 2,048 queries and keys."""
    b, h, s, d = 2, 8, 2048, 64
    graph = torch.fx.Graph()
    q, k, v, out, lse, mask, state = (
        graph.placeholder(name) for name in ("q", "k", "v", "out", "lse", "mask", "state")
    )
    is_forward = target is autopar.attention.default
    tensors = (q, k, v, mask) if is_forward else (q, q, k, v, out, lse, mask)
    special = (None, softcap, False) if is_forward else (False, softcap)
    dropout = (state, 0.1, 0, 0, [h * s * s, s * s, s, 1]) if drops else ()
    node = graph.call_function(target, (*tensors, True, None, 0, 0, 0, None, None, *special, *dropout))
    for n in (q, k, v, out):
        n.meta["val"] = torch.empty(b, h, s, d, dtype=dtype, device="meta")
    lse.meta["val"], mask.meta["val"] = (torch.empty(*shape, device="meta") for shape in ((b, h, s), (b, h, s, s)))
    state.meta["val"] = torch.empty(2, dtype=torch.int64, device="meta")
    node.meta["val"] = tuple(n.meta["val"] for n in ((q, lse) if is_forward else (q, k, v)))
    return price(node, cost)


PAIRS = 2 * 8 * 2048**2 / 2
DIRECTIONS = [(autopar.attention.default, 2, 10), (autopar.attention_bw.default, 5, 22)]


@pytest.mark.parametrize("target, products, passes", DIRECTIONS)
def test_in_fp32_what_no_kernel_does_runs_in_blocks(target, products, passes):
    """Caps, dropped weights, gradients of a mask: scores go through memory."""
    cost = ComputeCost(load("h100"))
    hardware = cost.hardware
    flops_per_second = hardware.reached_flops_per_second("fp32")
    capped = _seconds_without_kernel(cost, torch.float32, target, 5.0)
    wanted = products * 2 * PAIRS * 64 / flops_per_second
    wanted += passes * PAIRS * 4 / hardware.reached_memory_bytes_per_second
    assert capped == pytest.approx(wanted, rel=0.05)
    dropped = _seconds_without_kernel(cost, torch.float32, target, drops=True)
    assert dropped - capped == pytest.approx(8 * PAIRS / flops_per_second)


@pytest.mark.parametrize("target, _, __", DIRECTIONS)
def test_in_half_precision_what_no_kernel_of_torch_does_has_one(target, _, __):
    """It takes as long as flash, backward seven products for five, and the instructions of each weight."""
    cost, is_forward = ComputeCost(load("h100")), target is autopar.attention.default
    capped = _seconds_without_kernel(cost, torch.bfloat16, target, 5.0)
    dropped, both = (_seconds_without_kernel(cost, torch.bfloat16, target, softcap, True) for softcap in (0.0, 5.0))
    flash = replace(cost.hardware, attention={"flash": cost.hardware.attention["flash"]})
    plain = _seconds_without_kernel(ComputeCost(flash), torch.bfloat16, target)
    products = plain * (1.0 if is_forward else 7 / 5)
    each = PAIRS / (cost.hardware.peak_flops_per_second("fp32") / 2)
    assert dropped == pytest.approx(products + (23 if is_forward else 43) * each, rel=0.02)
    assert capped == pytest.approx(products + (13 if is_forward else 30) * each, rel=0.02)
    assert both == pytest.approx(dropped + capped - products, rel=0.02)
    blocks = _seconds_without_kernel(cost, torch.float32, target, 5.0)
    assert plain < capped < dropped < both < blocks


def test_the_gradient_of_what_is_added_takes_two_products_more():
    cost = ComputeCost(load("h100"))
    capped = _seconds_without_kernel(cost, torch.bfloat16, autopar.attention_bw.default, 5.0)
    learned = _seconds_without_kernel(cost, torch.bfloat16, autopar.attention_bias_bw.default, 5.0)
    each = PAIRS / (cost.hardware.peak_flops_per_second("fp32") / 2)
    assert (learned - 35 * each) / (capped - 30 * each) == pytest.approx(9 / 7, rel=0.03)


def test_a_causal_mask_saves_half_of_long_sequences_only():
    """A mask over n blocks of 128 queries leaves n (n + 1) / 2 pairs with blocks of keys to compute."""
    bare = Attention((128.0,), (0.35,))
    cost = ComputeCost(replace(load("h100"), attention={"flash": bare}))

    def share(seq: int) -> float:
        graph = torch.fx.Graph()
        q, k, v = (graph.placeholder(name) for name in "qkv")
        node = graph.call_function(autopar.attention.default, (q, k, v, None, True, None))
        with torch._subclasses.FakeTensorMode():
            for n in (q, k, v):
                n.meta["val"] = torch.empty(16384 // seq, 66, seq, 128)
            node.meta["val"] = torch.empty(16384 // seq, 66, seq, 128), torch.empty(16384 // seq, 66, seq)
        return (
            flops_of(node)
            / (price(node, cost) - cost.hardware.launch_seconds)
            / cost.hardware.peak_flops_per_second("fp32")
        )

    assert share(4096) == pytest.approx(0.35 * 32 / 33)
    assert share(128) == pytest.approx(0.35 / 2)


def test_prices_take_few_calls():
    """Three axes ask for 20,000 prices, each of some twenty calls."""
    mesh, cost = Mesh.parse("a=2,b=2,c=2"), ComputeCost(load("h100"))
    asked = [(n, s) for n in nodes(LLAMA) if n.target in PRODUCTS for s in strategies(n, mesh).values()]
    _, calls = counted(lambda: [cost.seconds(node, strategy, mesh, 0.0) for node, strategy in asked])
    assert len(asked) > 600 and calls < 40 * len(asked)


def test_fraction_counts_all_axes():
    mesh = Mesh.parse("a=2,b=3")
    assert fraction(Layout.parse("R", 2), mesh) == 1
    assert fraction(Layout.parse("a:S(0) b:S(1)", 2), mesh) == pytest.approx(1 / 6)
    assert fraction(Layout.parse("a:P b:S(1)", 2), mesh) == pytest.approx(1 / 3)


def test_a_large_model_takes_about_six_flops_a_parameter_and_token():
    """Kaplan et al., arXiv 2001.08361, section 2.1: 6 N for each token, and attention on top."""
    model, inputs = registry.build("llama3-8b:layers=2", batch=1, seq=1024, device="meta")
    graph = compiler.trace(model, inputs).graph
    counted = sum(flops_of(n) for n in graph.nodes if is_op(n) and "attention" not in str(n.target))
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() > 1 and "embed" not in name)
    assert counted == pytest.approx(6 * matrices * 1024, rel=1e-9)
    assert load("h100").reached_flops_per_second("bf16") < 989e12
