"""A finished search with all that it knows; autopar/planner/spmd/describe.py writes it down as a Plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from ...errors import AutoparError, StageError
from ...frontend.export import Captured
from ...ir.mesh import Mesh
from ...plans.entries import BatchCandidate, MeshCandidate
from ...plans.plan import Plan
from ..objective.evaluate import Evaluation
from ..objective.expand import whole_of
from ..objective.memory_timeline import LiveBytes, live_bytes
from ..objective.player import stretch_of
from ..objective.pricer import Pricer
from ..objective.timeline import Timeline, simulate
from ..problem.problem import Problem
from ..solver.search import Outcome
from ..solver.solver import Solver
from .describe import describe_plan
from .plan_options import PlanOptions

if TYPE_CHECKING:
    from ...passes.pipeline.micro_batch import MicroBatched
    from ..pipeline.plan import Staged


@dataclass(frozen=True, eq=False)
class Planned:
    """A finished search with all that it knows: what explanations, reports and traces read. `captured`: the call with
    the whole batch; `micro`: what it was cut into, if that was done, whose graph `problem` is about. `staged`: the
    stages that were found, if there are several; the rest is then the search for one micro-batch on the mesh of a
    stage."""

    model: str
    captured: Captured
    options: PlanOptions
    solver: Solver
    chosen: Outcome
    others: Mapping[str, Outcome | AutoparError]  # expert strategies, by name
    warnings: tuple[str, ...]
    seconds: float  # that planning took
    meshes: tuple[MeshCandidate, ...] = ()  # if the mesh was searched for too
    batches: tuple[BatchCandidate, ...] = ()  # if the batch was
    written: tuple[Problem, Evaluation] | None = None  # of every block, where copies of one recompute differently
    held: LiveBytes | None = None  # the memory of that, if it is known
    micro: MicroBatched | None = None
    staged: Staged | None = None
    staged_rows: tuple[StagedRow, ...] = ()  # experts' pipelines on the same devices, if they were asked for
    fp8: str = ""  # what computes in FP8, if that was a choice (autopar/api/fp8_choice.py)

    @property
    def problem(self) -> Problem:
        """Return the problem that was solved."""
        return self.solver.problem

    @property
    def pricer(self) -> Pricer:
        """Return the prices of ops and moves."""
        return self.solver.pricer

    @property
    def evaluation(self) -> Evaluation:
        """Return what the chosen plan costs."""
        return self.chosen.evaluation

    @cached_property
    def whole(self) -> tuple[Problem, Evaluation]:
        """Return the problem and the plan with every block of the model, which timelines and traces are about."""
        return self.written or whole_of(self.problem, self.evaluation)

    @cached_property
    def timeline(self) -> Timeline:
        """Play the chosen plan through, as it is priced."""
        return self.played()

    def played(self, slowdown: float | None = None) -> Timeline:
        """Play the chosen plan through with another slowdown of compute beside a collective, if one is given."""
        return simulate(*self.whole, self.pricer, slowdown)

    @cached_property
    def live_bytes(self) -> LiveBytes:
        """Return the memory of a device over the step."""
        return self.held or live_bytes(*self.whole, self.pricer)

    @cached_property
    def stretch(self) -> float:
        """Return how many times as long as its busiest streams need a pass takes as it is played."""
        return stretch_of(*self.whole, self.pricer, self.live_bytes.order)

    @property
    def stages(self) -> Staged:
        """Return the stages that were found. Raise StageError if there is one alone."""
        if self.staged is None:
            raise StageError(f"the plan for mesh {self.plan.mesh} has one stage", fix="plan for a mesh with an axis pp")
        return self.staged

    @property
    def inner(self) -> Planned:
        """Return the search for one micro-batch on the mesh of a stage."""
        return replace(self, staged=None)

    @cached_property
    def plan(self) -> Plan:
        """Describe the finished search as a Plan."""
        found = describe_plan(self) if self.staged is None else self.staged.plan
        return replace(found, fp8=self.fp8)


@dataclass(frozen=True)
class StagedRow:
    """A recipe on a mesh with stages: what was planned, or why nothing was."""

    strategy: str
    mesh: Mesh
    micro_batches: int
    schedule: str
    planned: Planned | AutoparError
