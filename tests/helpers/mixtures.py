"""Plans of pipelines whose stages take their decisions from plans of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.errors import StrategyError
from autopar.frontend.export import Captured
from autopar.hardware.profile import load
from autopar.ir.graph import fingerprint
from autopar.ir.mesh import Mesh
from autopar.passes.pipeline.micro_batch import MicroBatched
from autopar.planner.pipeline.mixed import Mixture, mixed
from autopar.planner.pipeline.shardings import stage_shardings
from autopar.planner.spmd.batch import AUTO, samples_of
from autopar.planner.spmd.plan import search, solvers_of
from autopar.planner.spmd.plan_options import PlanOptions
from autopar.planner.spmd.planned import Planned
from autopar.plans.pipeline import Pipeline, inside
from autopar.plans.plan import Plan

STRATEGIES = (None, "ddp", "zero1", "fsdp", "megatron", "megatron_sp", "megatron_sp+fsdp", "expert")


def plans_of(micro: MicroBatched, mesh: str, strategies: Sequence[str | None] = STRATEGIES) -> tuple[Planned, ...]:
    """Plans of a micro-batch under those strategies that the mesh of a stage has."""
    whole = Mesh.parse(mesh)
    options = PlanOptions(load("cpu-gloo"), baselines=False, micro_batches=micro.micro_batches, within=whole)
    solvers, found = solvers_of(micro.captured, inside(whole), options), []
    for strategy in strategies:
        try:
            asked = replace(options, strategy=strategy)
            found.append(search(micro.captured, inside(whole), asked, solvers=solvers))
        except StrategyError:
            continue
    return tuple(found)


def mixture(
    captured: Captured,
    micro: MicroBatched,
    plans: Sequence[Planned],
    mesh: str,
    schedule: str,
    of_stage: Sequence[int],
    cuts: Sequence[str],
) -> tuple[Plan, Mixture] | None:
    """The plan whose stages begin at the ops `cuts` and take those of `plans`, and what it is priced at; None if no
    redistribution makes what a stage reads of another one."""
    first, p = plans[of_stage[0]], Mesh.parse(mesh).size("pp")
    found = mixed([one.whole for one in plans], of_stage, cuts, first.pricer, first.solver.free)
    if found is None:
        return None
    plan = replace(first, written=(found.problem, found.evaluation), held=found.live).plan
    pipeline = Pipeline("pp", p, schedule, micro.micro_batches, (len(cuts) + 1) // p, tuple(cuts))
    shardings = stage_shardings(found.problem, found.evaluation, cuts, of_stage)
    return replace(
        plan,
        strategy=AUTO,  # stages of one strategy are sharded alike
        mesh=Mesh.parse(mesh),
        pipeline=pipeline,
        reduces_once=True,
        shardings=shardings,
        samples=samples_of(captured.signature),
        fingerprint=fingerprint(captured.graph),
    ), found
