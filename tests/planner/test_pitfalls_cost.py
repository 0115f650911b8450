"""Pitfalls met on real graphs, one test each: what must be paid once, what must be paid at all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from autopar.compiler import lower
from autopar.cost.compute import ComputeCost, flops_of
from autopar.cost.redistribute import Redistributor
from autopar.hardware.profile import Link
from autopar.ir.graph import bytes_of, tensor_of
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.planner.problem import symmetry as folding
from autopar.planner.problem.multipliers import Prices
from autopar.planner.problem.vertices import STATE
from autopar.rules import Strategy

from .planning import Instance, captured, counts, make, toy

aten = torch.ops.aten
LLAMA = "llama:hidden=64,layers=2,heads=4,kv_heads=2,ffn=192,vocab=256,seq=32"
TWO = Mesh.parse("d=2,t=4")
LINKS = {"d": Link(1e-5, 1e9), "t": Link(1e-6, 1e10)}  # slow outside, fast inside


@pytest.fixture(scope="module")
def sequence_parallel():
    graph = captured(LLAMA, 4, 32)
    plan = make(graph, "tp=2", toy(flops=1e10, memory=1e10, latency=1e-9), strategy="megatron_sp")
    return plan, lower(graph, plan, 0).local.graph


def of_activations(local, phase: str, kind: str, module: str) -> list[str]:
    """Tensors of the collectives on whole activations (4, 32, 64) in fp32, in modules whose path starts so."""
    found = [
        n.meta["collective"] for n in local.nodes if n.meta.get("collective") and n.meta["module"].startswith(module)
    ]
    return [c.tensor for c in found if (c.phase, c.kind) == (phase, kind) and c.wire_bytes == 4 * 32 * 64 * 4 / 2]


def test_one_gather_for_query_key_and_value(sequence_parallel):
    """4: three consumers that want the same layout share one payment, and one collective."""
    _, local = sequence_parallel
    assert len(of_activations(local, "forward", "all_gather", "layers.0.self_attn")) == 1
    assert len(of_activations(local, "forward", "all_gather", "layers.0.mlp")) == 1  # gate and up


def test_gathered_activation_is_kept_for_the_backward(sequence_parallel):
    """5: what the forward gathered is not gathered again while memory is free."""
    plan, local = sequence_parallel
    again = {t for module in ("layers.0", "layers.1") for t in of_activations(local, "backward", "all_gather", module)}
    forward = {t for module in ("layers.0", "layers.1") for t in of_activations(local, "forward", "all_gather", module)}
    assert len(forward) == 4 and not forward & again
    assert forward <= {name for name, _, _ in plan.sharding.kept}


def test_kept_copies_cost_memory():
    """5: with a price on bytes a copy is kept only while making it again costs more."""
    instance = Instance(LLAMA, "tp=2", strategy="megatron_sp", batch=4, seq=32)
    choice = instance.minimize().choice
    prices = [0.0, 1e-10, 1e-9, 1e-8, 1e-6]
    costs = [instance.evaluate(choice, Prices(price, True)) for price in prices]
    assert all(a.saved_bytes >= b.saved_bytes and a.seconds <= b.seconds for a, b in zip(costs, costs[1:]))
    assert costs[-1].saved_bytes < costs[0].saved_bytes and costs[-1].seconds > costs[0].seconds


def test_gradients_of_query_key_and_value_are_added_before_they_are_reduced(sequence_parallel):
    """6: Partial passes through the adds, so that one reduce-scatter does for three gradients."""
    _, local = sequence_parallel
    for norm in ("layers.0.input_layernorm", "layers.0.post_attention_layernorm"):
        (tensor,) = of_activations(local, "backward", "reduce_scatter", norm)
        assert tensor.startswith("add")


def test_cheapest_order_of_moves():
    """7: what is large is done over the fast axis, what is left over the slow one."""
    redistribute = Redistributor(TWO, LINKS, 1e11)

    def moves(source: str, target: str) -> list[str]:
        return [str(s.move) for s in redistribute(Layout.parse(source, 2), Layout.parse(target, 2)).steps]

    assert moves("t:S(0) d:P", "R") == ["all_reduce[d] sum", "all_gather[t] S(0)"]
    assert moves("d:P t:P", "t:S(0)") == ["reduce_scatter[t] S(0)", "all_reduce[d] sum"]
    assert moves("R", "d:S(0) t:S(1)")[0].startswith("slice")


def test_saved_bytes_are_those_of_the_layout_that_is_kept():
    """9: a gathered copy is charged whole, a sharded value its shard; views of a saved value are not charged again
    (16), but may be saved in its place."""
    instance = Instance(LLAMA, "tp=2", strategy="megatron_sp", batch=4, seq=32)
    cost = instance.evaluate(instance.minimize().choice)
    views = (aten.reshape.default, aten.transpose.int, aten.t.default, aten.permute.default, aten.unsqueeze.default)
    saved = {instance.problem.vertices[v].node for v, _, _ in cost.saved}
    for (v, output, layout), bytes_ in cost.saved.items():
        node = base = instance.problem.vertices[v].node
        value = node.meta["val"] if isinstance(node.meta["val"], torch.Tensor) else node.meta["val"][output]
        assert bytes_ == bytes_of(value) / 2 ** len(layout.sharding_axes)
        while base.target in views:
            base = base.args[0]
            assert base not in saved
    assert any(not layout.sharding_axes for _, _, layout in cost.saved)


def test_local_slices_cost_time():
    """16: a slice sends nothing, but it reads and writes memory."""
    redistribution = Redistributor(TWO, LINKS, 1e11)(Layout.parse("R", 2), Layout.parse("t:S(0)", 2))
    assert redistribution.wire_fraction == 0 and redistribution.seconds_per_byte > 0


def test_launch_is_added():
    """13: sharding an op that is smaller than a launch still shows, else everything small would be replicated."""
    cost = ComputeCost(toy(flops=1e12, memory=1e12, launch=1e-3))
    node = next(n for n in captured("mlp:hidden=8,layers=1").graph.nodes if "linear" in str(n.target))
    mesh, rows = Mesh.parse("a=2"), Layout.replicated(len(node.meta["val"].shape))
    whole = Strategy((rows, Layout.replicated(2)), (rows,), ("",), 1)
    cut = Layout((("a",), *rows.dims[1:]))
    half = replace(whole, inputs=(cut, whole.inputs[1]), outputs=(cut,), ways=2)
    saved = cost.seconds(node, whole, mesh, 100.0) - cost.seconds(node, half, mesh, 50.0)
    assert saved == pytest.approx(flops_of(node) / 2 / 1e12, rel=1e-3) and cost.seconds(node, half, mesh, 50.0) > 1e-3


def test_parameters_share_the_latency_of_a_bucket():
    """14: a gradient of a thousandth of a bucket pays a thousandth of the latency, an activation all of it."""
    instance = Instance("mlp:hidden=8,layers=1", "a=2", toy(latency=1.0, bucket=1000))
    problem, pricer = instance.problem, instance.pricer
    gradient = next(u for u in problem.uses if u.slot == STATE)
    parameter = next(v for v in problem.vertices if v.kind == "parameter")
    activation = next(v for v in problem.vertices if v.kind == "op")
    assert pricer.is_bucketed(gradient.producer, [gradient.slot]) and pricer.is_bucketed(parameter.index, [0])
    assert not pricer.is_bucketed(activation.index, [0])
    partial, whole = Layout(((),), (("a", "sum"),)), Layout(((),))
    assert pricer.bucket_of(gradient.producer, [gradient.slot], 5000) == 0
    assert pricer.bucket_of(activation.index, [0], 100) == 0
    assert 0 < pricer.bucket_of(gradient.producer, [gradient.slot], 100) <= 1000
    assert pricer.seconds(partial, whole, 100, 1000) == pytest.approx(0.1, rel=1e-3)
    assert pricer.seconds(partial, whole, 100, 0) == pytest.approx(1.0, rel=1e-3)


def test_all_reduce_over_two_axes_is_one():
    """15: in the price, in the plan and in the graph."""
    (step,) = Redistributor(TWO, LINKS, 1e11)(Layout.parse("d:P t:P", 1), Layout.parse("R", 1)).steps
    assert step.move.kind == "all_reduce" and step.move.axes == ("d", "t")
    assert step.wire_fraction == pytest.approx(
        2 * 3 / 4 + 2 * (1 / 2) / 4
    )  # inside first, then a quarter of it outside
    graph = captured("gpt:hidden=32,layers=1,heads=4,vocab=64,seq=16")
    plan = make(graph, "d=2,t=2", strategy="ddp")
    assert set(counts(plan, "backward")) == set(counts(plan, "backward", "d", "t")) == {"all_reduce"}
    found = [n.meta["collective"] for n in lower(graph, plan, 0).local.graph.nodes if n.meta.get("collective")]
    assert {c.axes for c in found} == {("d", "t")}


def test_optimizer_state_has_its_own_placement():
    """17: under a cap, state is sharded while the gathered parameters stay from forward to backward: ZeRO-2."""
    machine = toy(flops=1e11, memory=1e13, latency=2e-5, launch=1e-6, bucket=1 << 18)
    free = make("mlp:hidden=64,layers=4", "dp=4", machine, batch=512, seq=1)
    assert free.memory["optimizer"] == 8 * sum(p.numel() for p in parameters("mlp:hidden=64,layers=4", 512, 1))
    state = sum(free.memory[kind] for kind in ("parameters", "gradients", "optimizer"))
    needed = (
        free.peak_bytes - 0.75 * state + free.memory["parameters"]
    )  # all state sharded, the gathered parameters kept
    capped = make("mlp:hidden=64,layers=4", "dp=4", machine, batch=512, seq=1, memory_bytes=1.01 * needed)
    assert capped.memory["optimizer"] < 0.4 * free.memory["optimizer"]
    assert capped.memory["gathered parameters kept"] > 0.8 * free.memory["parameters"]
    assert "all_gather" not in counts(capped, "backward") and not capped.recomputed


def parameters(model: str, batch: int, seq: int) -> list[torch.Tensor]:
    graph = captured(model, batch, seq).graph
    return [n.meta["val"] for n in graph.nodes if n.op == "placeholder" and n.meta["role"].kind == "parameter"]


def test_folding_sees_couplings():
    """Fold (c): a gradient has its parameter's layout, so what tells two parameters apart tells their gradients
    apart."""
    instance = Instance("mlp:hidden=8,layers=2", "a=2", folded=False)
    vertices, uses = instance.problem.vertices, instance.problem.uses
    weights = {v.node.meta["role"].name: v for v in vertices if v.kind == "parameter"}
    first, second = weights["blocks.0.down.bias"], weights["blocks.1.down.bias"]
    gradients = {u.consumer: u.producer for u in uses if u.slot == STATE}
    marked = [replace(v, signature=(*v.signature, "marked")) if v is first else v for v in vertices]
    classes = folding.fold(marked, uses, radius=1)
    assert classes[first.index] != classes[second.index]
    assert classes[gradients[first.index]] != classes[gradients[second.index]]


def test_folding_ignores_names_of_nodes():
    """Fold (d): only the digits of a block and names of nodes differ between equal blocks."""
    instance = Instance("llama:hidden=32,layers=4,heads=4,kv_heads=2,ffn=64,vocab=64,seq=16", "a=2")
    for name, members in weights_of_blocks(instance).items():
        assert len({v.cls for v in members[2:4]}) == 1, name


def weights_of_blocks(instance: Instance) -> dict[str, list]:
    found: dict[str, list] = {}
    for v in instance.problem.vertices:
        if v.kind == "parameter" and v.node.meta["role"].name.startswith("layers."):
            found.setdefault(v.node.meta["role"].name.split(".", 2)[2], []).append(v)
    return found


def test_every_use_of_a_tensor_is_known_to_its_hyperedge():
    """Fold (b): hyperedges count real tensors: copies times members is every tensor with a use, once."""
    from autopar.planner.solver.hyperedges import hyperedges_of

    instance = Instance(LLAMA, "a=2", batch=4, seq=32)
    used = {(u.producer, u.output) for u in instance.problem.uses}
    assert sum(hyperedge.copies for hyperedge in hyperedges_of(instance.problem)) == len(used)
    assert all(np.isfinite(instance.problem.tensor_bytes[t]) for t in used)
    assert {tensor_of(instance.problem.vertices[p].node)[0] for p, _ in used} <= set(captured(LLAMA, 4, 32).graph.nodes)
