"""The pipelines of one mesh and one number of micro-batches: plans of a micro-batch, and for each schedule the best cut of them.

    plans of one micro-batch: the fastest; if memory is short, one at the price of what it makes compute again     (planner/make.py)
        for some schedules                                                                     (schedule/catalogue.py)
            the best cut into stages, with how much of each is computed again     (planner/pieces.py, stage_cut.py, stage_loops.py)
                an estimate, by the formulas of the schedule                      (planner/stages.py)
                judged: the schedule played with the stages' seconds and bytes    (planner/stage_judge.py)

Estimates need the few blocks of a deep model's compact graph alone; what is judged is the whole graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from .capture import Captured
from .cost.collectives import CollectiveCost
from .errors import MemoryInfeasibleError
from .mesh import Mesh
from .passes.micro_batch import MicroBatched, few_blocks, micro_batch
from .pipeline_plan import Pipeline, axis_of, inside
from .planner.evaluate import Evaluation
from .planner.forced import AUTO
from .planner.make import Planned, PlanOptions, search, solvers_of
from .planner.pieces import Chain, chain
from .planner.restrict import Restriction
from .planner.search import Run
from .planner.solve import Solver
from .planner.stage_again import Again
from .planner.stage_cut import cut_stages
from .planner.stage_judge import Judged, judge, timing_of
from .planner.stage_loops import cut_looped
from .planner.stages import StageCut
from .planner.whole import is_even
from .schedule.catalogue import KINDS

PRICES = (1e-4, 1e-3, 1e-2, 1.0)  # of a byte that are tried: of what steps that compute again cost for one
LESS = 0.95  # of what a next plan of a micro-batch may hold, so that it is another one
MOST_LIMITS = 3  # on the memory of a micro-batch's plan that are tried, until its stages fit
MOST_CUTS = 3  # of one schedule, each with less memory than the one before, until the judge agrees that it fits
MOST_AGAIN = 4  # times that a cut is given more to compute again

Report = Callable[[str], None]


@dataclass(frozen=True)
class Estimate:
    """A cut of a plan of a micro-batch for a schedule, by formulas. `peak_bytes`: of the fullest rank."""

    search: PipelineSearch
    inner: Planned
    schedule: str
    stages_per_rank: int
    step_seconds: float
    peak_bytes: float
    fits: bool


@dataclass(frozen=True)
class Tried:
    """A pipeline that was judged, and the plan of a micro-batch that it was made of, with what its stages compute again."""

    judged: Judged
    inner: Planned
    micro: MicroBatched
    bound: float
    limit: float

    @property
    def fits(self) -> bool:
        return self.judged.peak_bytes <= self.limit


def _fastest(estimates: Sequence[Estimate]) -> Estimate:
    return min(estimates, key=lambda one: one.step_seconds)


class PipelineSearch:
    """All that is tried of a captured graph of the whole batch with one number of micro-batches. `kinds`: schedules with their
    stages a rank. Raises MicroBatchError if the batch cannot be cut so."""

    def __init__(self, captured: Captured, micro_batches: int, mesh: Mesh, options: PlanOptions, name: str,
                 kinds: Sequence[tuple[str, int]], report: Report):  # fmt: skip
        axis = axis_of(mesh)
        self.captured, self.micro_batches, self.axis, self.whole_mesh = captured, micro_batches, axis, mesh
        self.name, self.kinds, self.report = name, kinds, report
        self.ranks, self.mesh = mesh.size(axis), inside(mesh, axis)
        self.limit = float(options.memory_bytes or options.hardware.memory_bytes)
        self.options = replace(options, within=mesh, micro_batches=micro_batches, baselines=False, memory_bytes=None)
        self.collectives = CollectiveCost(options.hardware, mesh)
        report(f"{mesh}, {micro_batches} micro-batches")
        if captured.compact is None:
            self.micro = micro_batch(captured, micro_batches)
        self.few = few_blocks(captured, micro_batches) if captured.compact else self.micro.captured
        self.solvers = solvers_of(self.few, self.mesh, self.options, report)
        self.bound = 0.0

    @cached_property
    def micro(self) -> MicroBatched:
        self.report(f"cutting the batch into {self.micro_batches}")
        return micro_batch(self.captured, self.micro_batches)

    def send(self, bytes_: float) -> float:
        """Seconds of a tensor of so many bytes of a device from one stage to the next."""
        return self.collectives.seconds("send", (self.axis,), bytes_)

    def estimates(self) -> list[Estimate]:
        """For each schedule the best cut of the fastest plan of a micro-batch; if that has to compute again, or does not fit, of
        smaller ones too, until one does."""
        first = self._planned(math.inf)
        self.bound = self.micro_batches * first.chosen.bound_seconds / self.ranks
        found = self._cuts(first)
        if self.options.recompute == AUTO and not _fastest(found).fits:
            for inner in self._priced(first):
                found += (new := self._cuts(inner))
                if _fastest(new).fits:
                    break
        return found

    def smaller(self, found: Sequence[Estimate]) -> list[Estimate]:
        """The same of plans that hold ever less than those of `found`, which do not fit, until one fits."""
        new: list[Estimate] = []
        for _ in range(MOST_LIMITS if self.options.recompute == AUTO else 0):
            closest = min((*new, *found), key=lambda one: one.peak_bytes)
            reserve = closest.inner.problem.reserve_bytes
            share = (self.limit - reserve) / max(closest.peak_bytes - reserve, 1.0)
            limit = reserve + (closest.inner.evaluation.bytes_ - reserve) * min(LESS, share)
            try:
                new += self._cuts(self._planned(limit)) if limit > reserve else []
            except MemoryInfeasibleError:
                break
            if limit <= reserve or any(one.fits for one in new):
                break
        return new

    def _cuts(self, inner: Planned) -> list[Estimate]:
        pieces = self._chain(inner if is_even(inner.evaluation) else self._of_whole(inner))
        return [self._estimate(inner, pieces, kind, v) for kind, v in self._possible(pieces)]

    def _priced(self, first: Planned) -> Iterator[Planned]:
        """What is fastest where a byte costs ever more, up to as much as a middling step that frees one: less may have to be
        computed again. Unlike those that a limit gives, such plans decide alike in all blocks: stages hold equally much."""
        solver, e = first.solver, first.evaluation
        steps = sorted(step.price for step in solver.blocks.recomputation(e, solver.free))
        seen = [e.choice]
        for share in PRICES if steps else ():
            restriction = replace(Restriction.of(self.options.strategy, self.mesh), forbidden=self.options.forbid)
            run = Run(solver, restriction, solver.allowed(restriction, dict(self.options.pin)), solver.search)
            priced = run.at(replace(solver.free, byte_seconds=share * steps[len(steps) // 2], saved=True))
            if priced.evaluation.choice not in seen:
                seen.append(priced.evaluation.choice)
                yield replace(first, chosen=replace(priced, bound_seconds=first.chosen.bound_seconds))

    def _planned(self, limit: float) -> Planned:
        """The fastest plan of a micro-batch that holds so many bytes at most."""
        old = self.solvers[0]
        some = min(limit, self.ranks * self.limit * 1e3)
        solvers = [Solver(s.problem, s.pricer, some, s.search, self.report, s.free.overlap) for s in self.solvers]
        for solver in solvers:
            solver.found = old.found
        options = self.options if limit == math.inf else replace(self.options, refuses=True)
        return search(self.few, self.mesh, options, self.name, self.report, solvers)

    def _chain(self, inner: Planned) -> Chain:
        fewest = self.ranks * max(1, min(v for _, v in self.kinds))
        prices = inner.solver.free if self.options.recompute == AUTO else None
        return chain(inner.problem, inner.evaluation, inner.pricer, fewest, self.send, prices=prices)

    def _possible(self, pieces: Chain) -> list[tuple[str, int]]:
        """Schedules for which there are pieces enough; the only one whatever there are, for its error."""
        enough = [(kind, v) for kind, v in self.kinds if self.ranks * v <= len(pieces.pieces)]
        return enough if len(self.kinds) > 1 else list(self.kinds)

    def _estimate(self, inner: Planned, pieces: Chain, kind: str, v: int) -> Estimate:
        reserve, fits = inner.problem.reserve_bytes, True
        try:
            found = self._cut(pieces, kind, v, self.limit - reserve)
        except MemoryInfeasibleError:
            found, fits = self._cut(pieces, kind, v, math.inf), False
        alone = v if KINDS[kind].v_shaped else 1  # stages of a rank that were cut as if each were a rank's only one
        seconds = found.step_seconds * alone + pieces.once_seconds / self.ranks
        return Estimate(self, inner, kind, v, seconds, reserve + max(stage.total_bytes for stage in found.stages) * alone, fits)

    def _cut(self, pieces: Chain, kind: str, v: int, room: float) -> StageCut:
        timing = timing_of(kind, self.ranks, v)
        if KINDS[kind].v_shaped:
            return cut_stages(pieces.pieces, self.ranks * v, self.micro_batches, room / v, timing, pieces.shared)
        return cut_looped(pieces.pieces, self.ranks, self.micro_batches, room, timing, pieces.shared)

    # judging

    def judged(self, one: Estimate) -> Tried:
        """The best cut for a schedule that the judge lets fit, else the one that holds least of those tried."""
        inner = self._of_whole(one.inner)
        pieces, free = self._chain(inner), self.options.recompute == AUTO and not inner.evaluation.recomputed
        again = Again(inner) if free else None
        room = self.limit - inner.problem.reserve_bytes
        best: tuple[Judged, Evaluation] | None = None
        for _ in range(MOST_CUTS):
            try:
                cut = self._cut(pieces, one.schedule, one.stages_per_rank, room)
            except MemoryInfeasibleError:
                if best is not None:
                    break
                cut, room = self._cut(pieces, one.schedule, one.stages_per_rank, math.inf), -math.inf
            pipeline = Pipeline(self.axis, self.ranks, one.schedule, self.micro_batches, one.stages_per_rank, pieces.cuts(cut.cuts))
            judged, e = self._settled(inner, pipeline, again)
            if best is None or judged.peak_bytes < best[0].peak_bytes:
                best = judged, e
            excess = judged.peak_bytes - self.limit
            if excess <= 0 or room < 0:
                break
            room -= excess
        judged, e = best
        return Tried(judged, replace(inner, written=(inner.whole[0], e)), self.micro, self.bound, self.limit)

    def _settled(self, inner: Planned, pipeline: Pipeline, again: Again | None) -> tuple[Judged, Evaluation]:
        """A pipeline with as much computed again on each rank as its memory demands, or as can be."""
        problem, e = inner.whole
        judged = judge(problem, e, inner.pricer, pipeline, self.send, inner.live_bytes)
        for _ in range(MOST_AGAIN if again is not None else 0):
            if judged.peak_bytes <= self.limit:
                break
            more = again.more(e, judged, self.limit) or again.all()
            if more.recompute_seconds == e.recompute_seconds:
                break
            e = more
            judged = judge(problem, e, inner.pricer, pipeline, self.send)
        return judged, e

    def _of_whole(self, inner: Planned) -> Planned:
        """The same plan of the whole graph."""
        if self.few.compact is None or self.few.compact.whole:
            return inner
        if self.micro.captured.compact is None:  # its blocks are not cut alike
            return search(self.micro.captured, self.mesh, replace(self.options, refuses=False), self.name, self.report)
        solver = next(s for s in self._whole_solvers if s.pricer.reduces_once == inner.pricer.reduces_once)
        return replace(inner, captured=self.micro.captured, solver=solver)

    @cached_property
    def _whole_solvers(self) -> list[Solver]:
        return solvers_of(self.micro.captured, self.mesh, self.options, self.report)
