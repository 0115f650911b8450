"""Products beside exchanges of experts' rows: steps are exact, and graphs hide the bytes that plans do."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from autopar import compile as compile_
from autopar import compiler
from autopar.ir.mesh import Mesh
from autopar.ops import autopar
from autopar.planner.spmd.plan import search
from autopar.planner.spmd.plan_options import PlanOptions
from autopar.planner.spmd.planned import Planned
from autopar.simulate import census
from autopar.simulate.compare import verify_plan
from benchmarks.overlap import LOW
from tests.families import FAMILIES
from tests.helpers import gloo
from tests.helpers.inductor import compiled_census
from tests.helpers.same_gradients import assert_same_gradients
from tests.helpers.shared_experts import SharedExperts, gpus, inputs

EXACT = 1e-10
MESHES = {
    "ep=2": "expert", "ep=3": "expert", "ep=4": "expert", "dp=2,ep=2": "expert+zero1", "ep=2,dp=2": "expert",
    "dp=2,ep=3": "expert+fsdp", "ep=2,tp=2": "expert+megatron_sp", "ep=3,tp=2": "expert+megatron_sp+zero1",
}  # fmt: skip


def planned(captured, mesh: str, strategy: str | None, **options) -> Planned:
    options = {"hardware": gpus(), "baselines": False, "strategy": strategy, **options}
    return search(captured, Mesh.parse(mesh), PlanOptions(**options))


def check_census(found: Planned) -> float:
    """Compare what a plan hides with what is hidden in the graph; return the bytes. What a plan computes again and
    nothing reads is not in the graph."""
    program = compiler.lower(found.captured, found.plan, 0, True)
    plan = census.exchanges_of_plan(found)
    graphs = census.of_graphs(program, census.exchanges_in(program))
    assert found.plan.recomputed or graphs.moved == pytest.approx(plan.moved, rel=1e-3)
    assert plan.overlapped * LOW <= graphs.overlapped <= plan.overlapped * (2 - LOW)
    apart = replace(found.plan, sharding=replace(found.plan.sharding, exchanges=()))
    parameters = [census.of_graphs(one) for one in (program, compiler.lower(found.captured, apart, 0))]
    assert parameters[0].overlapped >= LOW * parameters[1].overlapped  # and gradients
    return plan.overlapped


def check_gradients(found: Planned, model, given) -> None:
    """Compare a step with the model, and what it sends with one whose exchanges are waited for at once."""
    report = verify_plan(found.captured, found.plan, model, given)
    assert max(report.errors.values()) <= EXACT, (report.errors, report.diverging)
    sharding = replace(found.plan.sharding, exchanges=())
    apart = verify_plan(found.captured, replace(found.plan, sharding=sharding), model, given)
    assert report.sent_bytes == apart.sent_bytes and report.collectives == apart.collectives


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(24))
def test_any_layers(seed):
    """Layers of any shapes, on any mesh, have a shared expert first or last, weighted or not."""
    print(f"seed {seed}")
    random = Random(seed)
    mesh = [*MESHES][seed % len(MESHES)]
    model = SharedExperts(
        random.choice([1, 2, 3]), random.choice([7, 8, 11]), random.choice([1, 2]), random.random() < 0.5,
        random.random() < 0.5, seed,
    )  # fmt: skip
    given = inputs(random.choice([24, 48]), random.choice([11, 16]))
    found = planned(compiler.trace(model, given), mesh, MESHES[mesh])
    assert found.plan.routing is not None
    assert check_census(found) > 0
    check_gradients(found, model, given)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "qwen2_moe", "glm4_moe", "ernie4_5_moe", "dots1"])
@pytest.mark.parametrize("mesh", ["ep=2", "dp=2,ep=2", "ep=2,tp=2"])
def test_families(name, mesh):
    """They compute norms and routers in fp32."""
    torch.manual_seed(0)
    model, given = FAMILIES[name](8, 6)
    found = planned(compiler.trace(model, given), mesh, MESHES[mesh])
    assert found.plan.routing is not None
    assert check_census(found) > 0
    report = verify_plan(found.captured, found.plan, model, given)
    assert max(report.errors.values()) <= 1e-5, (report.errors, report.diverging)


@pytest.mark.parametrize("mesh", ["ep=2", pytest.param("ep=2,dp=2", marks=pytest.mark.slow)])
def test_what_is_computed_again(mesh):
    """Exchanges of recomputed blocks are waited for at once."""
    model, given = SharedExperts(3), inputs()
    captured = compiler.trace(model, given)
    found = planned(captured, mesh, "expert", recompute="full")
    assert found.plan.recomputed and check_census(found) > 0
    check_gradients(found, model, given)


@pytest.mark.parametrize("mesh, micro_batches", [("ep=2", 2), ("pp=2,ep=2", 2)])
def test_micro_batches(mesh, micro_batches):
    """With stages or without, and beside other work of a micro-batch alone."""
    model, given = SharedExperts(4), inputs(16)
    plan = compiler_plan(model, given, mesh, micro_batches)
    assert plan.sharding.exchanges and plan.routing.beside_seconds > plan.routing.gained_seconds > 0
    report = verify_plan(compiler.trace(model, given), plan, model, given)
    assert max(report.errors.values()) <= EXACT, report.errors


def compiler_plan(model, given, mesh: str, micro_batches: int, **options):
    """Plan a model in micro-batches, with stages if the mesh has them."""
    from autopar import plan

    return plan(model, mesh, given, hardware=gpus(), strategy="expert", micro_batches=micro_batches, baselines=False,
                precision="fp32", **options)  # fmt: skip


def test_weights_that_are_multiplied_later_are_beside_nothing():
    """A schedule that splits backwards has products of inputs' gradients alone beside exchanges."""
    model, given = SharedExperts(4), inputs(16)
    plan = compiler_plan(model, given, "pp=2,ep=2", 4, schedule="zb_h1")
    beside = [name for one in plan.sharding.exchanges for name in one.products]
    assert beside and not [name for name in beside if "_dw" in name]
    report = verify_plan(compiler.trace(model, given), plan, model, given)
    assert max(report.errors.values()) <= EXACT, report.errors


@pytest.mark.parametrize("execution", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
def test_on_real_processes(execution):
    gloo.run(2, _on_processes, execution, seconds=900)


def _on_processes(rank: int, execution: str) -> None:
    """Steps of several batches, whose rows go to experts in other numbers each time."""
    model, reference = SharedExperts(), SharedExperts()
    batches = [inputs(4) for _ in range(3)]
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    parallel = compile_(
        model, mesh, example_inputs=batches[0], strategy="expert", hardware=gpus(), execution=execution,
        precision="fp32",
    )  # fmt: skip
    assert parallel.plan.sharding.exchanges
    assert_same_gradients(parallel, reference, batches, EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("first", [False, True])
def test_inductor_leaves_products_beside_exchanges(first):
    found = planned(compiler.trace(SharedExperts(first=first), inputs()), "ep=2", "expert")
    program = compiler.lower(found.captured, found.plan, 0)
    rows = census.exchanges_in(program)
    emitted, compiled = census.of_graphs(program, rows), compiled_census(program, hideable=rows)
    assert compiled.moved == pytest.approx(emitted.moved)
    assert compiled.overlapped >= LOW * emitted.overlapped > 0


def test_nothing_moves_where_collectives_run_beside_nothing():
    found = planned(compiler.trace(SharedExperts(), inputs()), "ep=2", "expert", hardware=replace(gpus(), nccl=None))
    assert found.plan.routing is not None and not found.plan.sharding.exchanges
    local = compiler.lower(found.captured, found.plan, 0).local
    starts = [n for n in local.graph.nodes if n.target is autopar.exchange_rows.default]
    assert starts and all(n.next in n.users for n in starts)
