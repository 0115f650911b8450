"""Whole steps on the simulator under hand-written and random shardings give autograd's loss and gradients."""

import random
from collections import Counter

import pytest
import torch

from autopar.errors import VerifyError
from autopar.frontend.export import differentiate, export
from autopar.ir.graph import is_op, output_node, tensor_arguments, tensor_of, values_of
from autopar.ir.layout import Layout, is_legal
from autopar.ir.mesh import Mesh
from autopar.models import gpt, llama
from autopar.passes.canonicalize.rewrite import canonicalize
from autopar.passes.distribute.localize import localize
from autopar.plans.sharding import NodeSharding, Sharding
from autopar.rules import rule_of, strategies

from .lowering import MLP, capture, compare_with_autograd, global_values, links, random_layout, run_step, written


def mlp(batch=4, hidden=8, inner=12):
    model = MLP(hidden, inner)
    generator = torch.Generator().manual_seed(1)
    inputs = tuple(torch.randn(batch, 6, hidden, generator=generator, dtype=torch.float64) for _ in range(2))
    return model, inputs, *capture(model, *inputs)


def collectives(part):
    return Counter(n.meta["collective"].kind for n in part.graph.nodes if "collective" in n.meta)


DATA = {
    "linear": "dp:S(0)|R->dp:S(0)", "linear_1": "dp:S(0)|R->dp:S(0)", "mul": "dp:S(0)|R->dp:S(0)",
    "sum_1": "dp:S(0)->dp:P", "div": "R->R", "expand": "R->dp:S(0)",
    "linear_dx": "dp:S(0)|R->dp:S(0)", "linear_dx_1": "dp:S(0)|R->dp:S(0)",
    "linear_dw": "dp:S(0)|dp:S(0)->dp:P", "linear_dw_1": "dp:S(0)|dp:S(0)->dp:P",
    "sum_2": "dp:S(0)->dp:P", "view": "dp:P->dp:P",
}  # fmt: skip
INPUTS = {"x_args_0_": "dp:S(0)", "x_args_1_": "dp:S(0)"}


@pytest.mark.slow
@pytest.mark.parametrize("batch, devices", [(4, 2), (5, 2), (7, 3)])
@pytest.mark.parametrize("reduce_scatter", ["native", "all_to_all"])
def test_data_parallel(batch, devices, reduce_scatter):
    model, inputs, joint, values = mlp(batch)
    sharding = written(joint, Mesh(("dp",), (devices,)), "dp:S(0)", DATA, INPUTS, ["R"] * 4)
    whole, parts, _ = run_step(joint, sharding, values, reduce_scatter)
    compare_with_autograd(model, inputs, whole)
    assert collectives(parts[0].forward) == {"all_reduce": 1}  # the loss
    assert collectives(parts[0].backward) == {"all_reduce": 3}  # one a parameter


TENSOR = {
    "linear": "R|tp:S(0)->tp:S(2)", "linear_1": "tp:S(2)|tp:S(1)->tp:P",
    "linear_dx": "R|tp:S(1)->tp:S(2)", "linear_dx_1": "tp:S(2)|tp:S(0)->tp:P",
    "linear_dw": "R|tp:S(2)->tp:S(1)", "linear_dw_1": "tp:S(2)|R->tp:S(0)",
} | {name: "tp:S(2)->tp:S(2)" for name in ("relu", "detach", "detach_1")} | {
    "threshold_backward": "tp:S(2)|tp:S(2)->tp:S(2)",
}  # fmt: skip


@pytest.mark.parametrize("inner, devices", [(12, 2), (13, 3)])
def test_tensor_parallel_needs_one_all_reduce_each_way(inner, devices):
    model, inputs, joint, values = mlp(inner=inner)
    leaves, outputs = {"p_up": "tp:S(0)", "p_down": "tp:S(1)"}, ["R", "R", "tp:S(0)", "tp:S(1)"]
    whole, parts, simulator = run_step(
        joint, written(joint, Mesh(("tp",), (devices,)), "R", TENSOR, leaves, outputs), values
    )
    compare_with_autograd(model, inputs, whole)
    assert collectives(parts[0].forward) == collectives(parts[0].backward) == {"all_reduce": 1}
    activation = 4 * 6 * 8 * 8  # bytes
    assert simulator.bytes_sent == pytest.approx([2 * 2 * (devices - 1) / devices * activation] * devices)


SHARDS = ["R", "dp:S(0)", "dp:S(0)", "dp:S(0)"]
SHARDED_LEAVES = INPUTS | {"p_scale": "dp:S(0)", "p_up": "dp:S(0)", "p_down": "dp:S(0)"}


def test_sharded_parameters_are_gathered_again_in_the_backward():
    model, inputs, joint, values = mlp()
    sharding = written(joint, Mesh.parse("dp=2"), "dp:S(0)", DATA, SHARDED_LEAVES, SHARDS)
    whole, parts, _ = run_step(joint, sharding, values)
    compare_with_autograd(model, inputs, whole)
    assert collectives(parts[0].forward) == {"all_gather": 3, "all_reduce": 1}
    assert collectives(parts[0].backward) == {"all_gather": 2, "reduce_scatter": 3}
    assert {"p_up", "p_down"} <= set(parts[0].saved)  # the shards


def test_kept_copies_are_not_gathered_again():
    model, inputs, joint, values = mlp()
    kept = frozenset({("p_up", 0, Layout.replicated(2)), ("p_down", 0, Layout.replicated(2))})
    sharding = written(joint, Mesh.parse("dp=2"), "dp:S(0)", DATA, SHARDED_LEAVES, SHARDS, kept=kept)
    whole, parts, _ = run_step(joint, sharding, values)
    compare_with_autograd(model, inputs, whole)
    assert collectives(parts[0].backward) == {"reduce_scatter": 3}
    assert {"p_up_all_gather", "p_down_all_gather"} <= set(parts[0].saved)


@pytest.mark.parametrize("batch, inner, mesh", [(4, 12, "dp=2,tp=2"), (5, 14, "dp=2,tp=3"), (4, 16, "tp=4,dp=2")])
def test_data_and_tensor_parallel_with_sharded_parameters(batch, inner, mesh):
    """Column-parallel weights are cut by tp, then by dp, so that gathering dp leaves a contiguous block."""
    model, inputs, joint, values = mlp(batch, inner=inner)
    both = {
        "mul": "dp:S(0)|R->dp:S(0)",
        "linear": "dp:S(0)|tp:S(0)->dp:S(0) tp:S(2)", "linear_1": "dp:S(0) tp:S(2)|tp:S(1)->dp:S(0) tp:P",
        "sum_1": "dp:S(0)->dp:P", "div": "R->R", "expand": "R->dp:S(0)",
        "linear_dx": "dp:S(0)|tp:S(1)->dp:S(0) tp:S(2)", "linear_dx_1": "dp:S(0) tp:S(2)|tp:S(0)->dp:S(0) tp:P",
        "linear_dw": "dp:S(0)|dp:S(0) tp:S(2)->tp:S(1) dp:P", "linear_dw_1": "dp:S(0) tp:S(2)|dp:S(0)->tp:S(0) dp:P",
        "threshold_backward": "|".join(["dp:S(0) tp:S(2)"] * 2) + "->dp:S(0) tp:S(2)",
        "sum_2": "dp:S(0)->dp:P", "view": "dp:P->dp:P",
    } | {name: "dp:S(0) tp:S(2)->dp:S(0) tp:S(2)" for name in ("relu", "detach", "detach_1")}  # fmt: skip
    leaves = INPUTS | {"p_up": "tp:S(0) dp:S(0)", "p_down": "dp:S(0) tp:S(1)"}
    outputs = ["R", "R", "tp:S(0) dp:S(0)", "dp:S(0) tp:S(1)"]
    sharding = written(joint, Mesh.parse(mesh), "dp:S(0)", both, leaves, outputs)
    whole, parts, _ = run_step(joint, sharding, values)
    compare_with_autograd(model, inputs, whole)
    assert collectives(parts[0].forward) == {"all_gather": 2, "all_reduce": 2}


def random_sharding(rng, joint, mesh):
    """Any strategy of its rule for every op, any layout for every leaf and output; half of the forward copies kept."""
    layouts, nodes, leaves, kept = {}, {}, {}, set()
    for node in joint.graph.nodes:
        if node.op == "placeholder":
            leaves[node.name] = layouts[node, 0] = random_layout(rng, node.meta["val"].shape, mesh)
        elif is_op(node):
            arguments, values = tensor_arguments(node), values_of(node)
            have = [layouts[tensor_of(a)] for a in arguments]
            rule, options = rule_of(node), []
            if rule is not None:
                options = strategies(rule, [a.meta["val"].shape for a in arguments], [v.shape for v in values], mesh)
            options = [s for s in options if all(set(i.partial) <= set(h.partial) for i, h in zip(s.inputs, have))]
            through = [s for s in options if any(i.partial for i in s.inputs)]  # rare otherwise
            options = through if through and rng.random() < 0.5 else options
            replicated = NodeSharding(*(tuple(Layout.replicated(v.dim()) for v in side)
                                        for side in ([a.meta["val"] for a in arguments], values)))  # fmt: skip
            nodes[node.name] = chosen = rng.choice(options) if options else replicated
            kept |= {
                (tensor_of(a)[0].name, tensor_of(a)[1], layout)
                for a, layout in zip(arguments, chosen.inputs) if rng.random() < 0.5
            }  # fmt: skip
            value = node.meta["val"]
            items = [0] if isinstance(value, torch.Tensor) else [i for i, v in enumerate(value) if v is not None]
            layouts |= {(node, i): layout for i, layout in zip(items, chosen.outputs)}
    outputs = tuple(random_layout(rng, v.meta["val"].shape, mesh) for v in output_node(joint.graph).args[0])
    assert all(is_legal(n.meta["val"].shape, leaves[n.name], mesh) for n in joint.graph.nodes if n.op == "placeholder")
    return Sharding(mesh, links(mesh, rng.randrange(99)), 1e11, nodes, leaves, outputs, frozenset(kept))


SIZES = [("a=2", (4, 8, 12)), ("a=3", (5, 7, 11)), ("a=2,b=2", (4, 6, 9)), ("a=2,b=3", (7, 6, 12))]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh, sizes", SIZES)
def test_any_choice_of_strategies_gives_the_same_gradients(mesh, sizes):
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    model, inputs, joint, values = mlp(*sizes)
    for _ in range(12 // Mesh.parse(mesh).devices):
        sharding = random_sharding(rng, joint, Mesh.parse(mesh))
        whole, _, _ = run_step(joint, sharding, values, rng.choice(["native", "all_to_all"]))
        compare_with_autograd(model, inputs, whole)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "build, options, mesh", [(gpt.build, {}, "a=4"), (llama.build, {"kv_heads": 3, "ffn": 20}, "a=3")]
)
def test_any_choice_of_strategies_of_a_language_model(build, options, mesh):
    """Attention, norms, embedding and loss, sharded in any way; four devices leave blocks of one element."""
    seed = random.randrange(10**6)
    print("seed", seed)
    torch.manual_seed(0)
    model = build(hidden=24, layers=1, heads=6, vocab=29, seq=8, **options).double()
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    batch = {"input_ids": torch.randint(0, 29, (4, 6)), "labels": torch.randint(0, 29, (4, 6))}
    exported = export(model, batch)
    canonicalize(exported.graph_module)
    joint = differentiate(exported).graph_module
    values = global_values(joint, model, batch)
    whole, _, _ = run_step(joint, random_sharding(random.Random(seed), joint, Mesh.parse(mesh)), values)
    loss = model(**batch).loss
    loss.backward()
    torch.testing.assert_close(whole["output", "0"], loss.detach(), rtol=1e-5, atol=1e-5)  # the models' norms are fp32
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(whole["gradient", name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_a_wrong_layout_is_named():
    _, _, joint, _ = mlp()
    mesh = Mesh.parse("tp=2")
    wrong = TENSOR | {"linear": "R|tp:S(0)->tp:S(1)"}
    sharding = written(joint, mesh, "R", wrong, {"p_up": "tp:S(0)"}, ["R"] * 4)
    with pytest.raises(VerifyError, match=r"linear: the local op gives \(4, 6, 6\).* on rank 0.*implies \(4, 3, 12\)"):
        localize(joint, sharding, 0)


def test_nothing_becomes_partial():
    _, _, joint, _ = mlp()
    sharding = written(joint, Mesh.parse("tp=2"), "R", {"relu": "tp:P->tp:P"}, {}, ["R"] * 4)
    with pytest.raises(VerifyError, match="linear is R and relu wants tp:P: no collective leads there"):
        localize(joint, sharding, 0)
