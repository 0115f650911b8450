"""Expert strategies restrict the same search: what their parameters, collectives and memory must look like."""

from __future__ import annotations

import math

import pytest

from autopar import compiler
from autopar.errors import MeshError, StrategyError
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.models import registry
from autopar.planner.problem.recipes import BASELINES, COMBINED, RECIPES, Restriction
from autopar.plans.plan import Plan

from .planning import captured, counts, make, toy

MODELS = {
    "gpt": "gpt:hidden=32,layers=2,heads=4,vocab=64,seq=16",
    "llama": "llama:hidden=32,layers=2,heads=4,kv_heads=2,ffn=64,vocab=64"
}  # fmt: skip
WAITING = toy(flops=1e9, memory=1e10, latency=1e-5)


def shapes(model: str) -> dict[str, tuple[int, ...]]:
    graph = captured(model).graph
    roles = {
        n.meta["role"].name: n for n in graph.nodes if n.op == "placeholder" and n.meta["role"].kind == "parameter"
    }
    return {name: tuple(node.meta["val"].shape) for name, node in roles.items()}


def layouts(plan: Plan, model: str) -> dict[str, Layout]:
    return {name: Layout.parse(plan.layouts[name], len(shape)) for name, shape in shapes(model).items()}


def elements(model: str) -> int:
    return sum(map(math.prod, shapes(model).values()))


@pytest.fixture(scope="module", params=list(MODELS))
def model(request) -> str:
    return MODELS[request.param]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", ["dp=4", "a=2,b=2"])
def test_ddp_replicates_parameters_and_reduces_gradients(model, mesh):
    plan = make(model, mesh, WAITING, strategy="ddp")
    assert all(layout.is_replicated for layout in layouts(plan, model).values())
    assert set(counts(plan, "backward")) == {"all_reduce"}
    assert plan.layouts["input_ids"] == " ".join(f"{axis}:S(0)" for axis in Mesh.parse(mesh).names)
    memory, count = plan.memory, elements(model)
    assert (memory["parameters"], memory["gradients"], memory["optimizer"]) == (4 * count, 4 * count, 8 * count)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "fsdp"])
def test_zero_shards_every_parameter(model, strategy):
    """ZeRO, arXiv 1910.02054, figure 1, in fp32: of 16 bytes a parameter, stage 1 keeps 4 + 4 whole, stage 2 the 4 of
    the gathered parameter, stage 3 none."""
    plan = make(model, "dp=4", WAITING, strategy=strategy, micro_batches=2 if strategy == "zero1" else 1)
    assert all(layout.sharding_axes == ("dp",) for layout in layouts(plan, model).values())
    state = sum(v for k, v in plan.memory.items() if k in ("parameters", "gradients", "optimizer"))
    kept, count = plan.memory.get("gathered parameters kept", 0.0), elements(model)
    whole_gradients = 4 * count * 3 / 4 if strategy == "zero1" else 0
    assert state == pytest.approx(16 * count / 4 + whole_gradients, rel=1e-9)
    if strategy == "fsdp":
        assert kept == 0 and counts(plan, "backward")["all_gather"] >= 6
        assert not [name for name, _, _ in plan.sharding.kept if name.startswith("p_")]
    else:
        assert 0.5 * 4 * count < kept <= 4 * count and "all_gather" not in counts(plan, "backward")
    # the position embedding's gradient is summed over the batch before it is looked up, so it may be reduced there
    assert counts(plan, "backward")["reduce_scatter"] >= len([name for name in shapes(model) if name != "wpe.weight"])


@pytest.mark.sampled(1)
def test_hsdp_shards_inside_and_replicates_outside(model):
    plan = make(model, "replicate=2,shard=2", WAITING, strategy="hsdp")
    assert all(layout.sharding_axes == ("shard",) for layout in layouts(plan, model).values())
    assert set(counts(plan, "forward", "shard")) >= {"all_gather"}
    assert set(counts(plan, "backward", "replicate")) == {"all_reduce"}
    assert set(counts(plan, "backward", "shard")) == {"all_gather", "reduce_scatter"}
    gathered_outside = [c for c in plan.collectives if c.kind == "all_gather" and "replicate" in c.axes]
    assert not gathered_outside


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["megatron", "megatron_sp"])
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2"])
def test_megatron_shards_matrices_over_the_tensor_axis(model, strategy, mesh):
    plan = make(model, mesh, WAITING, strategy=strategy)
    for name, layout in layouts(plan, model).items():
        if len(layout.dims) > 1:
            assert layout.sharding_axes == ("tp",), name
        assert "dp" not in layout.sharding_axes
    assert ("dp:S(0)" in plan.layouts["input_ids"]) == ("dp" in mesh)
    state = sum(plan.memory[k] for k in ("parameters", "gradients", "optimizer"))
    assert 8 * elements(model) <= state <= 8.5 * elements(model)


@pytest.mark.sampled(1)
def test_the_free_plan_is_not_slower_than_any_expert(model):
    plan = make(model, "dp=2,tp=2", WAITING, baselines=True)
    assert {a.name for a in plan.alternatives} == {*BASELINES, *COMBINED}
    for a in plan.alternatives:
        assert a.step_seconds >= plan.step_seconds and a.step_seconds >= plan.bound, a.name
    assert 0 <= plan.gap <= 2e-3


@pytest.mark.parametrize("strategy", [*RECIPES, "zero3", "tp", "tp_sp", "auto", None])
def test_axes_with_a_wrong_name_have_roles_by_place(strategy):
    restriction = Restriction.of(strategy, Mesh.parse("x=2,y=2"))
    assert list(restriction.roles) == ["x", "y"]
    if strategy in ("megatron", "tp", "megatron_sp", "tp_sp"):
        assert restriction.roles["x"] == "data" and restriction.roles["y"] != "data"


def test_optimizers_and_precisions_have_their_bytes():
    count = elements(MODELS["gpt"])
    narrow = compiler.trace(*registry.build(MODELS["gpt"], batch=8, seq=16, device="meta"), precision="bf16")
    for optimizer, precision, bytes_ in (("adamw", "fp32", 16), ("sgd", "fp32", 8), ("sgd_momentum", "fp32", 12),
                                         ("adamw", "bf16", 18), ("sgd", "bf16", 10)):  # fmt: skip
        model = narrow if precision == "bf16" else MODELS["gpt"]
        plan = make(model, "dp=4", WAITING, strategy="ddp", optimizer=optimizer, precision=precision)
        state = sum(plan.memory.get(k, 0) for k in ("parameters", "gradients", "optimizer"))
        assert (
            bytes_ * count * 0.99 <= state <= bytes_ * count
        )  # bf16 copies that the backward does not read go before others come
    for wrong in ({"optimizer": "lion9"}, {"precision": "fp4"}):
        with pytest.raises(StrategyError, match="use one of"):
            make(MODELS["gpt"], "dp=4", **wrong)


# pins


@pytest.mark.sampled(1)
def test_pins_hold_and_leave_the_rest_free(model):
    name = "h.*.mlp.c_fc.weight" if model.startswith("gpt") else "layers.*.mlp.up_proj.weight"
    plan = make(model, "dp=2,tp=2", WAITING, pin={name: "tp:S(0)"})
    pinned = [v for k, v in plan.layouts.items() if k.endswith(name.split("*.")[1])]
    assert len(pinned) == 2 and all("tp:S(0)" in text for text in pinned)
    whole = make(model, "dp=2,tp=2", WAITING, pin={"*": "R"})
    assert all(layout.is_replicated for layout in layouts(whole, model).values())


def test_a_pin_of_one_block_does_not_bind_the_others():
    """Blocks that share their choice are told apart where a pin names one of them."""
    plan = make(
        MODELS["gpt"], "tp=2", WAITING, pin={"h.0.mlp.c_fc.weight": "tp:S(1)", "h.1.mlp.c_fc.weight": "tp:S(0)"}
    )
    assert plan.layouts["h.0.mlp.c_fc.weight"] == "tp:S(1)" and plan.layouts["h.1.mlp.c_fc.weight"] == "tp:S(0)"


def test_a_pin_may_contradict_the_strategy():
    with pytest.raises(StrategyError, match="no layout of .* follows the pin"):
        make(MODELS["gpt"], "dp=4", strategy="ddp", pin={"wte.weight": "dp:S(0)"})


def test_errors_say_what_would_work():
    gpt = MODELS["gpt"]
    with pytest.raises(StrategyError, match="no strategy 'megatorn' is known") as error:
        make(gpt, "dp=2", strategy="megatorn")
    assert "megatron" in error.value.fix
    with pytest.raises(StrategyError, match="the mesh has 1") as error:
        make(gpt, "dp=2", strategy="hsdp")
    assert "fsdp" in error.value.fix
    with pytest.raises(StrategyError, match="matches no parameter") as error:
        make(gpt, "dp=2", pin={"h.0.mlp.c_fcc.weight": "R"})
    assert "h.0.mlp.c_fc.weight" in error.value.fix
    with pytest.raises(StrategyError, match="no layout of h.0.ln_1.bias follows the pin") as error:
        make("gpt:hidden=32,layers=1,heads=4,vocab=64,seq=16", "dp=64", pin={"h.0.ln_1.bias": "dp:S(0)"})
    assert "(32,)" in str(error.value)
    with pytest.raises(StrategyError, match="cannot read 'dp:S0' as a placement"):
        make(gpt, "dp=2", pin={"wte.weight": "dp:S0"})
    with pytest.raises(StrategyError, match="dim 2 of a tensor with 2 dims"):
        make(gpt, "dp=2", pin={"wte.weight": "dp:S(2)"})
    with pytest.raises(MeshError, match="tp"):
        make(gpt, "dp=2", pin={"wte.weight": "tp:S(0)"})
