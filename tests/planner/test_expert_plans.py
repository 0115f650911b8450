"""Experts' recipes beside a plan: what makes each fit, and that each is the plan that its name gives."""

from __future__ import annotations

import functools

import pytest

from autopar import compiler
from autopar.errors import MemoryInfeasibleError, StrategyError
from autopar.frontend.export import Captured
from autopar.ir.mesh import Mesh
from autopar.models.registry import build
from autopar.planner.problem.recipes import BASELINES, Restriction, compared_on
from autopar.planner.solver.search import Outcome
from autopar.planner.spmd.planned import Planned

from .planning import counts, make, searched

MODELS = {
    "mlp": "mlp:hidden=1024,layers=6",
    "gpt": "gpt:hidden=512,layers=6,heads=8,vocab=1024,seq=256",
    "llama": "llama:hidden=512,layers=6,heads=8,kv_heads=4,ffn=1408,vocab=1024,seq=256",
}


@functools.cache
def captured(model: str) -> Captured:
    return compiler.trace(*build(MODELS[model], batch=64, seq=256, device="meta"), precision="bf16")


def search(model: str, mesh: str = "dp=4,tp=2", **options) -> Planned:
    return searched(captured(model), mesh, **options)


@functools.cache
def tight(model: str) -> Planned:
    """Plan with three quarters of the memory that ZeRO-1 takes, so that no recipe fits as it is."""
    found = search(model, strategy="zero1", baselines=False)
    reserve = found.problem.reserve_bytes
    return search(model, memory=reserve + 0.75 * (found.evaluation.bytes_ - reserve))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model, every", [("mlp", False), ("gpt", False), ("gpt", True), ("llama", True)])
def test_a_row_is_the_plan_that_its_name_gives(model, every):
    """Every row is compared, or one of each way in which a recipe is made to fit."""
    found = tight(model)
    ways = {}
    for row in found.plan.alternatives:
        assert row.fits, row.name
        ways.setdefault((row.micro_batches > 1, row.recomputed_blocks > 0, row.offload), row)
    for row in found.plan.alternatives if every else ways.values():
        again = search(
            model, memory=found.solver.limit_bytes, strategy=row.name, baselines=False,
            micro_batches=row.micro_batches, offload=row.offload,
        )  # fmt: skip
        plan = again.plan
        figures = (plan.step_seconds, plan.communication_seconds, plan.peak_bytes)
        assert figures == (row.step_seconds, row.communication_seconds, row.peak_bytes), row.name
        assert len(plan.recomputed) + len(plan.recomputed_selectively) == row.recomputed_blocks
        assert plan.peak_bytes <= found.solver.limit_bytes
    assert len(ways) > 1 and "optimizer" in {offload for _, _, offload in ways}


@pytest.mark.slow
def test_the_table_says_what_makes_a_recipe_fit():
    lines = {row.name: row for row in tight("llama").plan.alternatives}
    text = str(tight("llama").plan)
    assert lines["ddp"].offload == "optimizer" and "optimizer on the host" in text
    assert f"{lines['zero1'].recomputed_blocks} blocks recomputed" in text
    row = next(row for row in lines.values() if row.micro_batches > 1)
    assert f"{row.micro_batches} micro-batches" in text


@pytest.mark.slow
def test_nothing_makes_a_recipe_fit_whose_layers_are_larger_than_the_memory():
    """DDP on a device that has room for the copies that compute of half of the parameters."""
    found = search("gpt", strategy="fsdp", baselines=False)
    parameters = found.plan.parameter_elements
    limit = found.problem.reserve_bytes + 2 * parameters / 2
    with pytest.raises(MemoryInfeasibleError):
        search("gpt", strategy="ddp", offload="optimizer", memory=limit, baselines=False)


def test_every_number_of_micro_batches_is_compared_by_the_step():
    """The rows of a plan with micro-batches are steps of as many."""
    found = search("mlp", "dp=4", micro_batches=4)
    for name, row in zip(found.others, found.plan.alternatives):
        if name == "hsdp":  # the mesh has no second axis for it
            continue
        assert row.micro_batches == 4
        assert row.step_seconds == pytest.approx(4 * found.others[name].seconds)


def test_meshes_say_which_recipes_there_are():
    assert compared_on(Mesh.parse("dp=8")) == BASELINES
    assert {"megatron_sp+zero1", "megatron_sp+fsdp"} <= set(compared_on(Mesh.parse("dp=4,tp=2")))
    assert "megatron_sp+hsdp" in compared_on(Mesh.parse("dp_replicate=2,dp_shard=2,tp=2"))
    assert {"ulysses+zero1", "all_gather_kv+fsdp"} <= set(compared_on(Mesh.parse("dp=4,cp=2")))
    assert "all_gather_kv+megatron_sp+zero1" in compared_on(Mesh.parse("dp=2,cp=2,tp=2"))
    for mesh in map(Mesh.parse, ("dp=4,tp=2", "dp=2,cp=2,tp=2", "a=2,b=2,c=2", "dp=4,cp=2")):
        assert all(Restriction.of(name, mesh).name == name for name in compared_on(mesh))


@pytest.mark.slow
def test_hsdp_beside_tensor_parallelism_shards_over_the_inner_data_axis():
    mesh = "dp_replicate=2,dp_shard=2,tp=2"
    plan = make("llama:hidden=32,layers=1,heads=4,kv_heads=2,ffn=64,vocab=64", mesh, strategy="megatron_sp+hsdp")
    for name, layout in plan.layouts.items():
        if name.endswith("proj.weight"):
            assert "dp_shard:" in layout and "tp:" in layout and "dp_replicate:" not in layout, name
    assert "all_gather" not in counts(plan, "forward", "dp_replicate")
    with pytest.raises(StrategyError):
        Restriction.of("megatron_sp+hsdp", Mesh.parse("dp=4,tp=2"))


def test_a_recipe_that_has_no_plan_says_why():
    found = search("mlp", "dp=4")
    assert not isinstance(found.others["hsdp"], Outcome) and "replicates over one axis" in str(found.plan)
