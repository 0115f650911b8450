"""The pipelines of one mesh and one number of micro-batches: plans of a micro-batch, and for each schedule the best cut
of them.

    plans of one micro-batch: the fastest; if memory is short, those at ever higher prices of it      (spmd/plan.py)
        for some schedules                                                             (schedule/catalogue.py)
            the best cut into stages, and how much of each is computed again           (segments, best_cut)
                estimated: the schedule played with the seconds of the cut's segments
                evaluated: the same with the whole graph's seconds and bytes, stage by stage              (evaluate.py)

Estimates need the few blocks of a deep model's compact graph alone; what is evaluated is the whole graph.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from ...cost.collectives import CollectiveCost
from ...cost.compute import EAGER
from ...errors import MemoryInfeasibleError
from ...frontend.export import Captured
from ...ir.mesh import Mesh
from ...passes.pipeline.tail import check_waits
from ...plans.pipeline import Pipeline, axis_of
from ...schedule.catalogue import KINDS, make
from ...schedule.timetable import Timetable
from ..objective.evaluate import Evaluation
from ..objective.expand import recomputes_alike
from ..objective.memory_timeline import LiveBytes, live_bytes
from ..spmd.fixed_recompute import AUTO
from ..spmd.outputs import may_be_unmade
from ..spmd.plan_options import PlanOptions
from ..spmd.planned import Planned
from .best_cut import best_cut
from .between import plans_between
from .candidate import Candidate
from .checkpoint import MOST_ROUNDS, StageRecomputation, recomputation_of
from .chunk_counts import attention_share, of_chunks
from .estimate import Estimate, estimate, even_seconds
from .evaluate import PipelineCost, evaluate_pipeline, parts_of
from .micro_batch_plans import MicroBatchPlans, Useful
from .segments import Chain, chain
from .stage_costs import Parts
from .stage_plans import StagePlans

GPIPE = ("gpipe", 1)  # the schedule for a step with a tail, with its stages a rank
LESS = 0.95  # of what a next plan of a micro-batch may hold, so that it is another one
LOOPED_CUTS = (True, False)  # roughly, for stages of even seconds, and for ranks of even seconds
MOST_LIMITS = 2  # on the memory of a micro-batch's plan that are tried, until its stages fit
MOST_CUTS = 3  # of one schedule, each with less memory than the one before, until its evaluation agrees that it fits
NEAR = 1.01  # times a step, of pipelines that may be faster than it with products beside the rows of their experts
TIGHTER = 0.85  # of what a pipeline's tensors hold: room for a cut whose boundaries are moved from elsewhere

Report = Callable[[str], None]


@dataclass(frozen=True)
class _Evaluated:
    """A cut of a plan, with what its stages compute again and the memory of one micro-batch. `least_seconds`: of its
    step if more is computed again as far as it has to be."""

    evaluated: PipelineCost
    inner: Planned
    e: Evaluation
    live: LiveBytes
    least_seconds: float
    of_stage: tuple[int, ...] = ()


class PipelineSearch:
    """All that is tried of a captured graph of the whole batch with one number of micro-batches, of which `row_chunks`
    that follow one another are chunks of the same rows. `kinds`: schedules with their stages a rank; of several those
    alone that can run the step. Raises MicroBatchError if the batch cannot be cut so, or the only schedule cannot run
    it."""

    def __init__(
        self,
        captured: Captured,
        micro_batches: int,
        mesh: Mesh,
        options: PlanOptions,
        name: str,
        kinds: Sequence[tuple[str, int]],
        report: Report,
        row_chunks: int = 1,
    ):
        axis = axis_of(mesh)
        assert axis is not None  # who searches has looked
        self.axis, self.whole_mesh, self.kinds = axis, mesh, kinds
        self.ranks, self.micro_batches = mesh.size(self.axis), micro_batches
        self.limit = float(options.memory_bytes or options.hardware.memory_bytes)
        self.collectives = CollectiveCost(options.hardware, mesh)
        self._chains: dict[Planned, Chain] = {}
        self._prepared: dict[Planned, tuple[Planned, Chain, StageRecomputation | None]] = {}
        self._timetables: dict[tuple[str, int], Timetable] = {}
        self._within: dict[tuple, tuple[float, _Evaluated]] = {}
        self._stages: dict[tuple[str, ...], Parts] = {}  # by cuts
        chunks = f", {row_chunks} chunks a row" if row_chunks > 1 else ""
        report(f"{mesh}, {micro_batches} micro-batches{chunks}")
        options = options if row_chunks == 1 else replace(options, execution=EAGER)  # as chunks run
        self.plans = MicroBatchPlans(captured, micro_batches, mesh, self.axis, options, name, report, row_chunks)
        self.row_chunks = row_chunks
        self.kinds = self._possible_with_tail(kinds if row_chunks == 1 else of_chunks(kinds))

    def _possible_with_tail(self, kinds: Sequence[tuple[str, int]]) -> Sequence[tuple[str, int]]:
        """Return those of some schedules, with their stages a rank, that can run the tail of the step, GPipe if none of
        several can. Raises MicroBatchError if the only one cannot."""
        if (tail := self.plans.tail) is None:
            return kinds
        orders = {kind: make(kind[0], self.ranks, self.micro_batches, kind[1]) for kind in kinds}
        able = [kind for kind, schedule in orders.items() if schedule.ends_forwards_first]
        if not able and len(kinds) > 1 and any(v == 1 for _, v in kinds):
            return [GPIPE]
        if not able:
            check_waits(tail, orders[kinds[0]])
        return able

    @property
    def bound(self) -> float:
        """Return seconds of a step that no pipeline with as many micro-batches undercuts."""
        return self.passes * self.plans.fastest.chosen.bound_seconds

    @property
    def passes(self) -> float:
        """Return how many times a mean rank computes what one pass of the whole graph does."""
        return self.plans.share * self.micro_batches / self.ranks

    def send(self, bytes_: float) -> float:
        """Return the seconds of a tensor of so many bytes of a device from one stage to the next."""
        return self.collectives.seconds("send", (self.axis,), bytes_)

    def under(self, strategy: str, kinds: Sequence[tuple[str, int]]) -> PipelineSearch:
        """Return the same search of what a strategy allows, with some schedules."""
        other = copy.copy(self)
        other.plans, other.kinds = self.plans.under(strategy), kinds
        other._chains, other._prepared, other._within, other._stages = {}, {}, {}, {}
        return other

    def estimates(self, judged: Sequence[Estimate] = ()) -> list[Estimate]:
        """Estimate for each schedule the best cut of the fastest plan of a micro-batch, and of smaller ones while those
        are of use: until one would be no faster than one that fits, even if it computed nothing again. `judged`: those
        that are known. Return what is new."""
        found, known = list(judged), [one.inner.evaluation.choice for one in judged]
        fastest, useful = min((one.step_seconds for one in judged if one.fits), default=math.inf), Useful()
        for inner in self.plans.at_prices(useful):
            useful.times = math.inf
            if inner.evaluation.choice in known:
                continue
            segments = self.segments(inner)
            least = min(even_seconds(self, segments, kind, v) for kind, v in self._possible(segments))
            if least >= fastest:
                break
            found += (new := self._cuts(inner, segments, fastest))
            fastest = min([fastest, *(one.step_seconds for one in new if one.fits)])
            useful.note(fastest, least)
            if min(one.least_seconds for one in new) >= fastest:
                break
        if self.plans.options.recompute == AUTO:
            found += plans_between(self, found)
        return found[len(judged) :]

    def estimated(self, inner: Planned, kind: str, v: int) -> Estimate:
        """Estimate the best cut of a plan of a micro-batch for one schedule."""
        return estimate(self, inner, self.segments(inner), kind, v)

    def smaller(self, closest: Estimate) -> list[Estimate]:
        """Estimate the same of plans that hold ever less than that of `closest`, which does not fit, until one fits."""
        new: list[Estimate] = []
        for _ in range(MOST_LIMITS if self.plans.options.recompute == AUTO else 0):
            reserve = closest.inner.problem.reserve_bytes
            share = (self.limit - reserve) / max(closest.peak_bytes - reserve, 1.0)
            limit = reserve + (closest.inner.evaluation.bytes_ - reserve) * min(LESS, share)
            if limit <= reserve:
                break
            try:
                inner = self.plans.within(limit)
            except MemoryInfeasibleError:
                break
            cuts = self._cuts(inner, self.segments(inner), math.inf)
            new += cuts
            closest = min(cuts, key=lambda one: one.peak_bytes)
            if any(one.fits for one in cuts):
                break
        return new

    def segments(self, inner: Planned) -> Chain:
        """Return the segments of a plan of a micro-batch, by its few blocks where they are enough."""
        if inner not in self._chains:
            planned = inner if recomputes_alike(inner.evaluation) else self.plans.of_whole(inner)
            self._chains[inner] = self._chain(planned)
        return self._chains[inner]

    def _cuts(self, inner: Planned, segments: Chain, fastest: float) -> list[Estimate]:
        """Estimate the best cut for each schedule; `fastest`: seconds of a pipeline that fits."""
        new: list[Estimate] = []
        for kind, v in self._possible(segments):
            new.append(estimate(self, inner, segments, kind, v, fastest))
            fastest = min(fastest, new[-1].step_seconds if new[-1].fits else math.inf)
        return new

    def _chain(self, inner: Planned) -> Chain:
        fewest = self.ranks * max(1, min(v for _, v in self.kinds))
        prices = inner.solver.free if self.plans.options.recompute == AUTO else None
        return chain(inner.problem, inner.evaluation, inner.pricer, fewest, self.send, prices=prices)

    def _possible(self, segments: Chain) -> list[tuple[str, int]]:
        """Return the schedules for which there are segments enough; the only one whatever there are, for its error."""
        enough = [(kind, v) for kind, v in self.kinds if self.ranks * v <= len(segments.segments)]
        return enough if len(self.kinds) > 1 else list(self.kinds)

    def pipeline(self, kind: str, v: int, cuts: tuple[str, ...]) -> Pipeline:
        """Return a pipeline without costs."""
        samples = self.plans.samples if self.plans.share < 1 else 0
        chunks = (self.row_chunks, attention_share(self.plans.fastest)) if self.row_chunks > 1 else (1, 0.0)
        return Pipeline(self.axis, self.ranks, kind, self.micro_batches, v, cuts, (), (), samples, *chunks)

    def timetable(self, kind: str, v: int) -> Timetable:
        """Return what plays a schedule with `v` stages a rank."""
        if (kind, v) not in self._timetables:
            pipeline = self.pipeline(kind, v, ("",) * (self.ranks * v - 1))
            shares = pipeline.shares if pipeline.samples or pipeline.row_chunks > 1 else ()
            self._timetables[kind, v] = Timetable(pipeline.orders, shares)
        return self._timetables[kind, v]

    # judging

    def evaluated(
        self, one: Estimate, moves: bool = True, most: float = math.inf, slowest: float = math.inf
    ) -> Candidate:
        """Evaluate the best cuts for a schedule: return the fastest whose evaluation fits, else the one that holds
        least of those tried. `moves`: boundaries, as the played step says; `most`: bytes that a cut takes; `slowest`:
        seconds of a step from which on a pipeline is of no use, so that nothing is done to make it fit."""
        looped = one.stages_per_rank > 1 and not KINDS[one.schedule].v_shaped
        # stages of even seconds, or ranks: the order of a looped schedule may wait for the longest stage
        found: list[_Evaluated] = []
        fitting: list[_Evaluated] = []
        for is_rough in LOOPED_CUTS if looped else (False,):
            found.append(self._fitted(one, is_rough, moves, most, slowest))
            if found[-1].evaluated.peak_bytes <= self.limit:
                fitting.append(found[-1])
                slowest = min(slowest, found[-1].evaluated.step_seconds)
        best = min(fitting or found, key=attrgetter("evaluated.step_seconds" if fitting else "evaluated.peak_bytes"))
        inner = replace(best.inner, written=(best.inner.whole[0], best.e), held=best.live)
        return Candidate(best.evaluated, one.inner, inner, self, one.others, best.of_stage)

    def from_elsewhere(self, one: Candidate) -> list[Candidate]:
        """Evaluate the same pipeline with the boundaries that formulas choose, as segments know roughly what they take,
        and with those moved from where they are with less memory. None if stages have plans of their own."""
        if one.others:
            return []
        less = TIGHTER * (one.evaluated.peak_bytes - one.base.problem.reserve_bytes)
        near = NEAR if one.base.problem.owned_axes else 1.0
        slowest = one.evaluated.step_seconds * near if one.fits else math.inf
        return [self.evaluated(one.estimate, *way, slowest) for way in ((False, math.inf), (True, less))]

    def _fitted(self, one: Estimate, is_rough: bool, moves: bool, most: float, slowest: float) -> _Evaluated:
        """Find a cut, with less and less memory until its evaluation fits; return the one that holds least if that
        does not help."""
        inner, segments, _ = self.prepared(one.inner)
        plans = StagePlans(self, one)
        room = min(self.limit - inner.problem.reserve_bytes, most)
        best: _Evaluated | None = None
        for _ in range(MOST_CUTS):
            try:
                cut = best_cut(self, segments, one.schedule, one.stages_per_rank, room, is_rough, moves, plans.others)
            except MemoryInfeasibleError:
                if best is not None:
                    break
                cut = best_cut(self, segments, one.schedule, one.stages_per_rank, math.inf, is_rough, moves)
                room = -math.inf
            pipeline = self.pipeline(one.schedule, one.stages_per_rank, segments.cuts(cut.cuts))
            inner, recomputation, of_stage = plans.chosen(cut, pipeline)
            found = replace(self._within_memory(inner, pipeline, recomputation, slowest), of_stage=of_stage)
            if best is None or found.evaluated.peak_bytes < best.evaluated.peak_bytes:
                best = found
            excess = found.evaluated.peak_bytes - self.limit
            if excess <= 0 or room < 0 or found.least_seconds >= slowest:
                break
            room -= excess
        assert best is not None
        return best

    def with_kinds(self, one: Candidate, kinds: Sequence[tuple[str, int]]) -> list[Candidate]:
        """Evaluate other schedules for the plan of a micro-batch of a candidate, or for its plans, without those that
        need more stages than it has segments."""
        inner = one.base
        _, segments, _ = self.prepared(inner)
        kinds = self._possible_with_tail(kinds)
        possible = [(kind, v) for kind, v in kinds if self.ranks * v <= len(segments.segments)]
        found = [replace(estimate(self, inner, segments, kind, v), others=one.others) for kind, v in possible]
        return [self.evaluated(one) for one in found]

    def _within_memory(
        self, inner: Planned, pipeline: Pipeline, recomputation: StageRecomputation | None, slowest: float
    ) -> _Evaluated:
        """Evaluate a pipeline that lets go of outputs beside the loss if its memory demands it, and with as much
        computed again on each rank as it demands then, or as can be, unless that is `slowest` seconds or more, or seems
        to be by what a mean rank computes again. Several ways lead to the same cut of a plan, which is evaluated
        once."""
        key = (inner, pipeline.schedule, pipeline.stages_per_rank, pipeline.cuts)
        if known := self._within.get(key):
            limit, found = known
            is_done = found.evaluated.peak_bytes <= self.limit or found.least_seconds < limit
            if is_done or slowest <= limit:
                return found
        found = self._made_to_fit(inner, pipeline, recomputation, slowest)
        self._within[key] = slowest, found
        return found

    def _made_to_fit(
        self, inner: Planned, pipeline: Pipeline, recomputation: StageRecomputation | None, slowest: float
    ) -> _Evaluated:
        (problem, e), live = inner.whole, inner.live_bytes
        found = self.stages(inner, e, pipeline, live, inner.stretch)
        evaluated, keeps = self.as_it_is(inner, pipeline, found)
        least = evaluated.step_seconds
        for turn in range(MOST_ROUNDS if recomputation is not None else 0):
            if evaluated.peak_bytes <= self.limit or least >= slowest:
                break
            more = recomputation.within(self.limit, e, evaluated, turn)
            if more.recompute_seconds == e.recompute_seconds:
                break
            least += self.passes * (more.recompute_seconds - e.recompute_seconds)
            if least >= slowest:
                break
            e, live = more, live_bytes(problem, more, inner.pricer)
            evaluated = self.judged(inner, e, pipeline, keeps, live)
            least = evaluated.step_seconds
        return _Evaluated(evaluated, inner, e, live, least)

    def as_it_is(self, inner: Planned, pipeline: Pipeline, found: Parts | None = None) -> tuple[PipelineCost, bool]:
        """Evaluate a pipeline that computes nothing again, whether it fits or not, and say whether it keeps outputs
        beside the loss, which it lets go of if its memory demands it. `found`: its stages, if they are known."""
        problem, e = inner.whole
        found = found or self.stages(inner, e, pipeline, inner.live_bytes, inner.stretch)
        evaluated = self.judged(inner, e, pipeline, True, found=found)
        if evaluated.peak_bytes <= self.limit or not may_be_unmade(self.plans.captured):
            return evaluated, True
        return self.judged(inner, e, pipeline, False, found=found), False

    def stages(
        self,
        inner: Planned,
        e: Evaluation,
        pipeline: Pipeline,
        live: LiveBytes | None = None,
        stretch: float | None = None,
    ) -> Parts:
        """Return the costs of the stages of a pipeline under an evaluation of a plan of the whole graph; arguments as
        of `parts_of`. Those of the last plan with the same cut are kept."""
        known, problem = self._stages.get(pipeline.cuts), inner.whole[0]
        is_known = known is not None and known.problem is problem and known.pricer is inner.pricer
        found = parts_of(problem, e, inner.pricer, pipeline, live, stretch, known if is_known else None)
        self._stages[pipeline.cuts] = found
        return found

    def judged(
        self,
        inner: Planned,
        e: Evaluation,
        pipeline: Pipeline,
        keeps_outputs: bool,
        live: LiveBytes | None = None,
        found: Parts | None = None,
    ) -> PipelineCost:
        """Evaluate a pipeline under an evaluation of a plan of the whole graph; further arguments as of
        `evaluate_pipeline`."""
        found = found or self.stages(inner, e, pipeline, live)
        return evaluate_pipeline(
            inner.whole[0], e, inner.pricer, pipeline, self.send, live, keeps_outputs, self.plans.tail_cost, found
        )

    def prepared(self, inner: Planned) -> tuple[Planned, Chain, StageRecomputation | None]:
        """Return a plan of the whole graph, its segments, and what may be computed again, if that is left to the
        search."""
        if inner not in self._prepared:
            whole = self.plans.of_whole(inner)
            is_free = self.plans.options.recompute == AUTO and not whole.evaluation.recomputed
            known, compact = self._chains.get(inner), whole.problem.compact
            if known and known.begins and compact and whole.evaluation is inner.evaluation:
                segments = known.of_whole(compact, whole.evaluation.first)
            else:
                segments = self._chain(whole)
            self._prepared[inner] = whole, segments, recomputation_of(whole) if is_free else None
        return self._prepared[inner]
