"""Experts' pipelines on the devices of a mesh without stages, costed beside its plan.

The outermost axis, the farthest apart, is split between stages and what it carried: of dp=8,tp=8 there are
pp=2,dp=4,tp=8 and pp=4,dp=2,tp=8 and so on. Inside of the stages the recipe is Megatron's, tensor and sequence
parallelism beside ZeRO-1, or the one of these that the mesh has axes for; the schedule is 1F1B, of micro-batches of one
sample a replica (Narayanan et al., SC 2021). Each is what a plan for that mesh is, asked for with the same strategy,
schedule and micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ...errors import AutoparError, StageError, not_compared
from ...frontend.export import Captured
from ...ir.mesh import Mesh
from ...plans.pipeline import AXIS, inside
from ..spmd.batch import data_ways, samples_of
from ..spmd.fixed_recompute import AUTO
from ..spmd.plan_options import PlanOptions
from ..spmd.planned import Planned, StagedRow
from .plan import plan_pipeline

RANKS = (2, 4, 8)  # along the axis of the stages
SCHEDULE = "1f1b"


def staged_rows(
    captured: Captured, mesh: Mesh, options: PlanOptions, name: str, report: Callable[[str], None]
) -> tuple[StagedRow, ...]:
    """Plan the experts' pipelines beside a plan of the captured call of a whole batch; none if something of the
    sharding was asked for, and those alone that the model has blocks and the batch samples enough for."""
    if options.strategy is not None or options.pin or options.forbid or options.recompute != AUTO:
        return ()
    batch, rows = samples_of(captured.signature), []
    for staged in _meshes(mesh):
        strategy = _recipe(inside(staged))
        micro_batches, left = divmod(batch, data_ways(inside(staged), strategy))
        if left or not micro_batches:
            continue
        report(f"{strategy} on {staged}")
        asked = replace(options, strategy=strategy, baselines=False, refuses=False, micro_batches=1)
        planned: Planned | AutoparError
        try:
            planned = plan_pipeline(
                captured,
                staged,
                asked,
                name,
                schedule=SCHEDULE,
                micro_batches=micro_batches,
                stages_per_rank=1,
                report=report,
            )
        except StageError:  # fewer blocks than stages
            continue
        except Exception as error:
            planned = not_compared(error)
        rows.append(StagedRow(strategy, staged, micro_batches, SCHEDULE, planned))
    return tuple(rows)


def _meshes(mesh: Mesh) -> Iterator[Mesh]:
    """Iterate over the meshes with stages of the same devices."""
    outer, size = mesh.names[0], mesh.sizes[0]
    for ranks in RANKS:
        if size % ranks == 0 and AXIS not in mesh.names:
            left = ((outer, size // ranks),) if size > ranks else ()
            yield Mesh(*zip(*((AXIS, ranks), *left, *zip(mesh.names[1:], mesh.sizes[1:]))))


def _recipe(mesh: Mesh) -> str:
    """Return the recipe of a stage's mesh."""
    axes = [name for name, size in mesh.axis_sizes.items() if size > 1]
    if len(axes) > 1:
        return "megatron_sp+zero1"
    return "megatron_sp" if "tp" in axes else "zero1"
