"""A pipeline that was evaluated, with what it was made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...passes.pipeline.micro_batch import MicroBatched
from ..spmd.planned import Planned
from .estimate import Estimate
from .evaluate import PipelineCost

if TYPE_CHECKING:
    from .search import PipelineSearch


@dataclass(frozen=True)
class Candidate:
    """A pipeline that was evaluated, the plan of a micro-batch that it was cut from, and the same with what stages
    compute again. `others`: plans of which stages might take one instead; `of_stage`: the number of the plan that each
    took, empty if all took the first; `gained_seconds`: of a step, by products beside exchanges of rows."""

    evaluated: PipelineCost
    base: Planned
    inner: Planned
    search: PipelineSearch
    others: tuple[Planned, ...] = ()
    of_stage: tuple[int, ...] = ()
    gained_seconds: float = 0.0

    @property
    def estimate(self) -> Estimate:
        """Return the same as an estimate that is right."""
        cost = self.evaluated
        kind, v = cost.pipeline.schedule, cost.pipeline.stages_per_rank
        return Estimate(self.search, self.base, kind, v, cost.step_seconds, cost.peak_bytes, self.fits)

    @property
    def micro(self) -> MicroBatched:
        """Return the batch cut into micro-batches."""
        return self.search.plans.micro

    @property
    def bound(self) -> float:
        """Return the seconds that no pipeline with as many micro-batches falls below."""
        return self.search.bound

    @property
    def limit(self) -> float:
        """Return the bytes that a device may take."""
        return self.search.limit

    @property
    def fits(self) -> bool:
        """Return whether the fullest rank fits."""
        return self.evaluated.peak_bytes <= self.limit

    def is_like(self, other: Candidate) -> bool:
        """Return whether this is the same pipeline of equal seconds, whatever search led to it."""
        return self.evaluated.pipeline == other.evaluated.pipeline
