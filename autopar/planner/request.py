"""One request for a plan, whoever makes it: `autopar.plan`, `compile`, `explain`, `estimate` and the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..errors import StrategyError
from ..frontend.export import Captured
from ..ir.mesh import Mesh
from ..plans.axes import check_axes
from ..plans.pipeline import axis_of, check_staged, inside
from ..schedule.actions import Schedule
from . import hot_choice
from .made_to_fit import made_to_fit
from .objective.loops import ALWAYS, NEVER
from .options import PIPELINES, options_of
from .pipeline import mesh_search
from .pipeline.expert_pipelines import staged_rows
from .pipeline.plan import plan_pipeline
from .problem.allowed import check_globs
from .spmd import accumulation
from .spmd.batch import AUTO, data_ways, fewest, in_micro_batches, samples_of
from .spmd.fixed_recompute import AUTO as ANY_SCHEDULE
from .spmd.plan import search
from .spmd.plan_options import PlanOptions
from .spmd.planned import Planned

Report = Callable[[str], None]


@dataclass(frozen=True)
class PlanRequest:
    """Holds what is asked of a plan. `mesh`: or a number of devices, for which meshes are tried. `options`: what is
    said of the sharding. `micro_batches`: how many the batch is cut into, AUTO for the fewest that fit without
    recomputation; None for one without stages, and as many as are best with them. `schedule` of the stages, with so
    many `stages_per_rank` (None: as many as are best). `sequence_chunks`: of the tokens of a micro-batch's rows, which
    follow one another through the stages (None: as many as are best)."""

    mesh: Mesh | int
    options: PlanOptions
    name: str = "model"
    micro_batches: int | str | None = None
    schedule: str | Schedule = ANY_SCHEDULE
    stages_per_rank: int | None = None
    sequence_chunks: int | None = None

    @staticmethod
    def of(
        mesh,
        name: str,
        *,
        micro_batches: int | str | None = None,
        schedule: str | Schedule = ANY_SCHEDULE,
        stages_per_rank: int | None = None,
        sequence_chunks: int | None = None,
        recompute: str = "auto",
        tile: str = "auto",
        loops: str = NEVER,
        refuses: bool = True,
        solver: str = "dual",
        styles=None,
        **options,
    ) -> PlanRequest:
        """Read the arguments of `autopar.plan` and `compile`, checked as far as they can be without a model; `options`
        are those of `options_of`. Raises subclasses of AutoparError for what cannot be right."""
        is_count = isinstance(mesh, int) and not isinstance(mesh, bool)
        read = Mesh(("dp",), (mesh,)) if is_count else Mesh.of(mesh)
        asked = options_of(mesh, **options)
        asked = replace(
            asked,
            recompute=recompute,
            tile=tile,
            loops=loops,
            refuses=refuses,
            styles=styles or {},
            search=replace(asked.search, solver=solver),
        )
        staged = micro_batches, schedule, stages_per_rank, sequence_chunks
        request = PlanRequest(mesh if is_count else read, asked, name, *staged)
        if not request.has_stages and micro_batches not in (None, AUTO):
            accumulation.check(micro_batches)
        if not is_count:
            check_staged(read, schedule, stages_per_rank, sequence_chunks)
            if loops == ALWAYS and axis_of(read) is not None:
                raise StrategyError("stages have no loops", fix='leave out loops="always", or the axis pp')
            asked.check(inside(read))
        return request

    @property
    def has_stages(self) -> bool:
        """Return whether the mesh has an axis for stages."""
        return isinstance(self.mesh, Mesh) and axis_of(self.mesh) is not None

    def find(self, captured: Captured, report: Report = lambda text: None) -> Planned:
        """Return the best plan of the captured call of a whole batch, with all that the search knows. Raises
        subclasses of AutoparError."""
        check_globs(self.options.strategy, captured.graph)
        return hot_choice.fastest(
            self.options, captured.graph, lambda options: replace(self, options=options)._found(captured, report)
        )

    def _found(self, captured: Captured, report: Report) -> Planned:
        """Return the best plan with as many copies of experts as the options say."""
        many = self.micro_batches
        if isinstance(self.mesh, Mesh) and axis_of(self.mesh):
            planned = plan_pipeline(
                captured,
                self.mesh,
                self.options,
                self.name,
                schedule=self.schedule,
                micro_batches=None if isinstance(many, str) else many,
                stages_per_rank=self.stages_per_rank,
                sequence_chunks=self.sequence_chunks,
                report=report,
            )
        elif isinstance(many, str):
            ways = data_ways(self.mesh, self.options.strategy) if isinstance(self.mesh, Mesh) else 1
            planned = fewest(lambda k: self._in(k, captured, report), samples_of(captured.signature), ways)
        else:
            planned = self._in(many or 1, captured, report)
        if self.options.baselines == PIPELINES and isinstance(self.mesh, Mesh) and not planned.staged:
            planned = replace(planned, staged_rows=staged_rows(captured, self.mesh, self.options, self.name, report))
        if self.options.strict and isinstance(self.mesh, Mesh):
            check_axes(planned.plan, True)
        return planned

    def _in(self, micro_batches: int, captured: Captured, report: Report) -> Planned:
        """Return the best plan with so many micro-batches; for a number of devices with stages or without."""
        mesh, options = self.mesh, replace(self.options, micro_batches=micro_batches)
        if isinstance(mesh, Mesh):
            planned = in_micro_batches(captured, options, lambda one, o: search(one, mesh, o, self.name, report))
        else:
            planned = mesh_search.search(
                captured, mesh, options, self.name, self.schedule, self.stages_per_rank, report
            )
        return planned if planned.staged else made_to_fit(planned, captured, report)
