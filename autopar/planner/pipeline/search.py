"""The pipelines of one mesh and one number of micro-batches: plans of a micro-batch, and for each schedule the best cut
of them.

    plans of one micro-batch: the fastest; if memory is short, those at ever higher prices of it      (spmd/plan.py)
        for some schedules                                                             (schedule/catalogue.py)
            the best cut into stages, and how much of each is computed again           (segments, cut, cut_interleaved)
                estimated: the schedule played with the seconds of the cut's segments
                evaluated: the same with the whole graph's seconds and bytes, stage by stage              (evaluate.py)

Estimates need the few blocks of a deep model's compact graph alone; what is evaluated is the whole graph.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

from ...cost.collectives import CollectiveCost
from ...errors import MemoryInfeasibleError
from ...frontend.export import Captured
from ...ir.mesh import Mesh
from ...passes.pipeline.micro_batch import MicroBatched
from ...passes.pipeline.tail import check_waits
from ...plans.pipeline import Pipeline, axis_of
from ...schedule.catalogue import KINDS, make
from ...schedule.play import play
from ...utils.format import size
from ..objective.evaluate import Evaluation
from ..objective.expand import recomputes_alike
from ..objective.memory_timeline import LiveBytes, live_bytes
from ..spmd.fixed_recompute import AUTO
from ..spmd.outputs import may_be_unmade
from ..spmd.plan_options import PlanOptions
from ..spmd.planned import Planned
from .between import plans_between
from .checkpoint import StageRecomputation
from .cut import cut_stages
from .cut_interleaved import cut_looped
from .evaluate import PipelineCost, evaluate_pipeline, parts_of, timing_of
from .micro_batch_plans import MicroBatchPlans
from .model import StageCut
from .part import Part
from .segments import Chain, chain

GPIPE = ("gpipe", 1)  # the schedule for a step with a tail, with its stages a rank
LESS = 0.95  # of what a next plan of a micro-batch may hold, so that it is another one
LOOPED_CUTS = (True, False)  # roughly, for stages of even seconds, and for ranks of even seconds
PLENTY = 0.5  # of the room: where no rank takes more, the limit decides nothing
MOST_LIMITS = 2  # on the memory of a micro-batch's plan that are tried, until its stages fit
MOST_CUTS = 3  # of one schedule, each with less memory than the one before, until its evaluation agrees that it fits
MOST_RECOMPUTE_ROUNDS = 4  # times that a cut is given more to compute again

Report = Callable[[str], None]


@dataclass(frozen=True)
class Estimate:
    """A cut of a plan of a micro-batch for a schedule, by formulas. `peak_bytes`: of the fullest rank; `least_seconds`:
    what a step would take at least if the memory had no limit."""

    search: PipelineSearch
    inner: Planned
    schedule: str
    stages_per_rank: int
    step_seconds: float
    peak_bytes: float
    fits: bool
    least_seconds: float = 0.0


@dataclass(frozen=True)
class Candidate:
    """A pipeline that was evaluated, the plan of a micro-batch that it was cut from, and the same with what stages
    compute again."""

    evaluated: PipelineCost
    base: Planned
    inner: Planned
    search: PipelineSearch

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


@dataclass(frozen=True)
class _Evaluated:
    """A cut of a plan, with what its stages compute again and the memory of one micro-batch."""

    evaluated: PipelineCost
    e: Evaluation
    live: LiveBytes


class PipelineSearch:
    """All that is tried of a captured graph of the whole batch with one number of micro-batches. `kinds`: schedules
    with their stages a rank; of several those alone that can run the step. Raises MicroBatchError if the batch cannot
    be cut so, or the only schedule cannot run it."""

    def __init__(
        self,
        captured: Captured,
        micro_batches: int,
        mesh: Mesh,
        options: PlanOptions,
        name: str,
        kinds: Sequence[tuple[str, int]],
        report: Report,
    ):
        axis = axis_of(mesh)
        assert axis is not None  # who searches has looked
        self.axis, self.whole_mesh, self.kinds = axis, mesh, kinds
        self.ranks, self.micro_batches = mesh.size(self.axis), micro_batches
        self.limit = float(options.memory_bytes or options.hardware.memory_bytes)
        self.collectives = CollectiveCost(options.hardware, mesh)
        self._chains: dict[Planned, Chain] = {}
        self._prepared: dict[Planned, tuple[Planned, Chain, StageRecomputation | None]] = {}
        report(f"{mesh}, {micro_batches} micro-batches")
        self.plans = MicroBatchPlans(captured, micro_batches, mesh, self.axis, options, name, report)
        self.kinds = self._possible_with_tail(kinds)

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
        return self.plans.share * self.micro_batches * self.plans.fastest.chosen.bound_seconds / self.ranks

    def send(self, bytes_: float) -> float:
        """Return the seconds of a tensor of so many bytes of a device from one stage to the next."""
        return self.collectives.seconds("send", (self.axis,), bytes_)

    def under(self, strategy: str, kinds: Sequence[tuple[str, int]]) -> PipelineSearch:
        """Return the same search of what a strategy allows, with some schedules."""
        other = copy.copy(self)
        other.plans, other.kinds, other._chains, other._prepared = self.plans.under(strategy), kinds, {}, {}
        return other

    def estimates(self) -> list[Estimate]:
        """Estimate for each schedule the best cut of the fastest plan of a micro-batch, and of smaller ones while those
        are of use: until one would be no faster than one that fits, even if it computed nothing again."""
        found: list[Estimate] = []
        fastest = math.inf  # of those that fit
        for inner in self.plans.at_prices():
            segments = self._segments(inner)
            if min(self._even_seconds(segments, kind, v) for kind, v in self._possible(segments)) >= fastest:
                break
            new = self._cuts(inner, segments)
            found += new
            fastest = min([fastest, *(one.step_seconds for one in new if one.fits)])
            if min(one.least_seconds for one in new) >= fastest:
                break
        return found + (plans_between(self, found) if self.plans.options.recompute == AUTO else [])

    def estimated(self, inner: Planned, kind: str, v: int) -> Estimate:
        """Estimate the best cut of a plan of a micro-batch for one schedule."""
        return self._estimate(inner, self._segments(inner), kind, v)

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
            cuts = self._cuts(inner, self._segments(inner))
            new += cuts
            closest = min(cuts, key=lambda one: one.peak_bytes)
            if any(one.fits for one in cuts):
                break
        return new

    def _segments(self, inner: Planned) -> Chain:
        if inner not in self._chains:
            planned = inner if recomputes_alike(inner.evaluation) else self.plans.of_whole(inner)
            self._chains[inner] = self._chain(planned)
        return self._chains[inner]

    def _cuts(self, inner: Planned, segments: Chain) -> list[Estimate]:
        return [self._estimate(inner, segments, kind, v) for kind, v in self._possible(segments)]

    def _chain(self, inner: Planned) -> Chain:
        fewest = self.ranks * max(1, min(v for _, v in self.kinds))
        prices = inner.solver.free if self.plans.options.recompute == AUTO else None
        return chain(inner.problem, inner.evaluation, inner.pricer, fewest, self.send, prices=prices)

    def _possible(self, segments: Chain) -> list[tuple[str, int]]:
        """Return the schedules for which there are segments enough; the only one whatever there are, for its error."""
        enough = [(kind, v) for kind, v in self.kinds if self.ranks * v <= len(segments.segments)]
        return enough if len(self.kinds) > 1 else list(self.kinds)

    def _estimate(self, inner: Planned, segments: Chain, kind: str, v: int) -> Estimate:
        reserve, least = inner.problem.reserve_bytes, self._even_seconds(segments, kind, v)
        room, once = self.limit - reserve, segments.once_seconds / self.ranks
        try:
            self._check_state(segments, room)
            found = self._cut(segments, kind, v, room, is_rough=True)
        except MemoryInfeasibleError as error:
            missing = error.missing_bytes * (v if KINDS[kind].v_shaped else 1)
            return Estimate(self, inner, kind, v, least, self.limit + missing, False, least)
        bytes_ = max(stage.total_bytes for stage in found.stages) * (v if KINDS[kind].v_shaped else 1)
        seconds = self._played(segments, found, kind, v) + once
        if bytes_ <= room * PLENTY:
            least = seconds
        elif not any(any(counts[1:]) for stage in found.stages for counts in stage.levels.values()):
            free = self._cut(segments, kind, v, math.inf, is_rough=True)
            least = min(seconds, self._played(segments, free, kind, v) + once)
        return Estimate(self, inner, kind, v, seconds, reserve + bytes_, True, least)

    def _even_seconds(self, segments: Chain, kind: str, v: int) -> float:
        """Return the seconds of a step whose ranks all take as long and compute nothing again."""
        even = [sum(segment.levels[0].seconds for segment in segments.segments) / self.ranks] * self.ranks
        step = timing_of(kind, self.ranks, v).step_seconds(even, self.micro_batches)
        return step + segments.once_seconds / self.ranks

    def _played(self, segments: Chain, cut: StageCut, kind: str, v: int) -> float:
        """Play the schedule with the seconds of a cut's segments and return its seconds; what is computed again is in
        the backward."""
        works = {}
        for stage in cut.stages:
            spans = [segments.parts[first:end] for first, end in stage.spans]
            own = [_seconds(span) for span in spans]
            seconds = sum(map(sum, own))
            slowdown = stage.seconds / seconds if seconds else 1.0  # a stage may have views alone
            for (first, _), (forward, inputs, weight) in zip(stage.spans, own):
                works[first] = forward, (forward + inputs + weight) * slowdown - forward - weight, weight
        firsts = sorted(works)
        sends = [max(segments.segments[first - 1].boundary_seconds) for first in firsts[1:]]
        pipeline = self._pipeline(kind, v, ("",) * (self.ranks * v - 1))
        return play(
            pipeline.orders, *map(list, zip(*(works[first] for first in firsts))), sends, shares=pipeline.shares
        ).seconds

    def _pipeline(self, kind: str, v: int, cuts: tuple[str, ...]) -> Pipeline:
        """Return a pipeline without costs."""
        return Pipeline(
            self.axis,
            self.ranks,
            kind,
            self.micro_batches,
            v,
            cuts,
            samples=self.plans.samples if self.plans.share < 1 else 0,
        )

    def _check_state(self, segments: Chain, room: float) -> None:
        """Raise MemoryInfeasibleError if parameters and optimizer state, spread evenly over the ranks, leave no room
        for activations, so that no cut has to be looked for."""
        state = sum(segment.state_bytes for segment in segments.segments) - sum(one.bytes_ for one in segments.shared)
        if state / self.ranks > room:
            missing = state / self.ranks - room
            raise MemoryInfeasibleError(
                f"parameters and optimizer state need {size(missing)} more a device",
                missing_bytes=math.ceil(missing),
                fix="use more devices",
            )

    def _cut(self, segments: Chain, kind: str, v: int, room: float, is_rough: bool = False) -> StageCut:
        """Cut the segments for a schedule. Raise MemoryInfeasibleError if no cut fits in the `room`."""
        timing = timing_of(kind, self.ranks, v)
        if KINDS[kind].v_shaped:
            ranks, room = self.ranks * v, room / v
            return cut_stages(
                segments.segments, ranks, self.micro_batches, room, timing, segments.shared, segments.levels
            )
        return cut_looped(
            segments.segments, self.ranks, self.micro_batches, room, timing, segments.shared, is_rough, segments.levels
        )

    # judging

    def evaluated(self, one: Estimate) -> Candidate:
        """Evaluate the best cuts for a schedule: return the fastest whose evaluation fits, else the one that holds
        least of those tried."""
        inner, _, _ = self.prepared(one.inner)
        looped = one.stages_per_rank > 1 and not KINDS[one.schedule].v_shaped
        # stages of even seconds, or ranks of even seconds: the order of a looped schedule may wait for the longest
        # stage
        found = [self._fitted(one, is_rough) for is_rough in (LOOPED_CUTS if looped else (False,))]
        fitting = [cost for cost in found if cost.evaluated.peak_bytes <= self.limit]
        best = min(fitting or found, key=attrgetter("evaluated.step_seconds" if fitting else "evaluated.peak_bytes"))
        inner = replace(inner, written=(inner.whole[0], best.e), held=best.live)
        return Candidate(best.evaluated, one.inner, inner, self)

    def _fitted(self, one: Estimate, is_rough: bool) -> _Evaluated:
        """Find a cut, with less and less memory until its evaluation fits; return the one that holds least if that
        does not help."""
        inner, segments, recomputation = self.prepared(one.inner)
        room = self.limit - inner.problem.reserve_bytes
        best: _Evaluated | None = None
        for _ in range(MOST_CUTS):
            try:
                cut = self._cut(segments, one.schedule, one.stages_per_rank, room, is_rough)
            except MemoryInfeasibleError:
                if best is not None:
                    break
                cut, room = self._cut(segments, one.schedule, one.stages_per_rank, math.inf, is_rough), -math.inf
            pipeline = self._pipeline(one.schedule, one.stages_per_rank, segments.cuts(cut.cuts))
            found = self._within_memory(inner, pipeline, recomputation)
            if best is None or found.evaluated.peak_bytes < best.evaluated.peak_bytes:
                best = found
            excess = found.evaluated.peak_bytes - self.limit
            if excess <= 0 or room < 0:
                break
            room -= excess
        return best

    def with_kinds(self, inner: Planned, kinds: Sequence[tuple[str, int]]) -> list[Candidate]:
        """Evaluate other schedules for a plan of a micro-batch, without those that need more stages than it has
        segments."""
        _, segments, _ = self.prepared(inner)
        kinds = self._possible_with_tail(kinds)
        possible = [(kind, v) for kind, v in kinds if self.ranks * v <= len(segments.segments)]
        return [self.evaluated(self._estimate(inner, segments, kind, v)) for kind, v in possible]

    def _within_memory(
        self, inner: Planned, pipeline: Pipeline, recomputation: StageRecomputation | None
    ) -> _Evaluated:
        """Evaluate a pipeline that lets go of outputs beside the loss if its memory demands it, and with as much
        computed again on each rank as it demands then, or as can be."""
        problem, e = inner.whole
        evaluate = partial(evaluate_pipeline, pricer=inner.pricer, send=self.send, tail=self.plans.tail_cost)
        live = inner.live_bytes
        found = parts_of(problem, e, inner.pricer, pipeline, live)
        evaluated, keeps = evaluate(problem, e, pipeline=pipeline, found=found), True
        if evaluated.peak_bytes > self.limit and may_be_unmade(self.plans.captured):
            keeps = False
            evaluated = evaluate(problem, e, pipeline=pipeline, found=found, keeps_outputs=keeps)
        for _ in range(MOST_RECOMPUTE_ROUNDS if recomputation is not None else 0):
            if evaluated.peak_bytes <= self.limit:
                break
            more = recomputation.more(e, evaluated, self.limit) or recomputation.all()
            if more.recompute_seconds == e.recompute_seconds:
                break
            e, live = more, live_bytes(problem, more, inner.pricer)
            evaluated = evaluate(problem, e, pipeline=pipeline, live=live, keeps_outputs=keeps)
        return _Evaluated(evaluated, e, live)

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
            self._prepared[inner] = whole, segments, StageRecomputation(whole) if is_free else None
        return self._prepared[inner]


def _seconds(parts: Sequence[Part]) -> tuple[float, float, float]:
    """Return the seconds of a stage: forward, input gradients, weight gradients."""
    return tuple(sum(getattr(part, f"{what}_seconds") for part in parts) for what in ("forward", "input", "weight"))
