"""Plan a pipeline: how many micro-batches, how each is sharded inside a stage, where stages begin, in which order they run.

    for some numbers of micro-batches                                     (passes/micro_batch.py)
        for plans of one micro-batch, the fastest first, then smaller     (planner/make.py, on the mesh of one stage)
            for some schedules                                            (schedule/catalogue.py)
                the best cut into stages                                  (planner/pieces.py, stage_cut.py, stage_loops.py)
                played with its own seconds and bytes                     (planner/stage_judge.py)

The fastest of those whose fullest rank fits is the plan. What is proven: no plan of a micro-batch takes less than the search's
bound, so no pipeline with as many of them takes less than that, divided over the ranks with nobody waiting. The gap to that bound
is mostly the bubble; that no other combination is faster is not proven.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from .accumulate import data_ways, samples_of
from .capture import Captured
from .cost.collectives import CollectiveCost
from .errors import MemoryInfeasibleError, MeshError, MicroBatchError, PipelineError, StrategyError
from .mesh import Mesh
from .passes.micro_batch import MicroBatched, micro_batch
from .pipeline_plan import Pipeline, axis_of, inside
from .plan import Alternative, Plan, fingerprint
from .planner.forced import AUTO, at_level
from .planner.live_bytes import SAVED
from .planner.make import Planned, PlanOptions, search, solvers_of
from .planner.pieces import Chain, chain
from .planner.remake import FULL, SELECTIVE
from .planner.solve import Solver
from .planner.stage_cut import cut_stages
from .planner.stage_judge import Judged, judge, timing_of
from .planner.stage_loops import cut_looped
from .schedule.catalogue import KINDS, canonical
from .units import percent, size

SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_h1", "interleaved_zero_bubble", "zbv")  # that are tried if none is asked for
COUNTS = (1, 2, 4)  # micro-batches a rank that are tried if no number is asked for
LESS = 0.95  # of what a next attempt may hold, so that it is another one
MOST_LIMITS = 4  # on the memory of a micro-batch's plan that are tried, until its stages fit
NEAR_ENOUGH = 1.03  # times the seconds of the fastest pipeline, that does not fit: no smaller plans are looked for
MOST_CUTS = 3  # of one schedule, each with less memory than the one before, until the judge agrees that it fits

Report = Callable[[str], None]


@dataclass(frozen=True)
class PipelinePlanned:
    """A finished search of a captured graph: the plan, that of a micro-batch on the mesh of a stage, and all that was tried."""

    captured: Captured
    plan: Plan
    inner: Planned
    micro: MicroBatched
    judged: Judged
    tried: tuple[Judged, ...]


def plan_pipeline(captured: Captured, mesh: Mesh, options: PlanOptions, name: str = "model", *, schedule: str = AUTO,
                  micro_batches: int | None = None, stages_per_rank: int | None = None,
                  report: Report = lambda text: None) -> PipelinePlanned:  # fmt: skip
    """The best pipeline found for the captured graph of a whole batch, over the axis pp of a mesh; `options` are those of the rest
    of the mesh. None and "auto" leave a choice to the search. Raises PipelineError, MicroBatchError, StageError, StrategyError, and
    MemoryInfeasibleError with the fullest rank of what came closest."""
    axis = axis_of(mesh)
    if axis is None:
        raise MeshError(f"mesh {mesh} has no axis pp of more than one device", fix="name one: pp=2,dp=4")
    _check_options(options, axis)
    options.check(inside(mesh, axis))
    kinds = _kinds(schedule, stages_per_rank)
    batch = samples_of(captured.signature)
    counts, warnings = _counts(captured, batch, mesh, options.strategy, micro_batches)
    found = [_Search(micro, mesh, axis, options, name, kinds, report).run() for micro in counts]
    tried = sorted((t for one in found for t in one.tried), key=lambda t: (not t.fits, t.judged.step_seconds))
    if not tried[0].fits and options.refuses:
        raise _refusal(min(tried, key=lambda t: t.judged.peak_bytes), tried[0].limit)
    best = tried[0] if tried[0].fits else min(tried, key=lambda t: t.judged.peak_bytes)
    return _described(best, tried, captured, mesh, warnings, batch)


def with_schedules(planned: PipelinePlanned, kinds: list[tuple[str, int]], options: PlanOptions,
                   report: Report = lambda text: None) -> list[Judged]:  # fmt: skip
    """Other schedules, with their stages a rank, for the plan of a micro-batch that is there already, each with its best cut.
    Those that need more stages than there are pieces are left out."""
    search = _Search(planned.micro, planned.plan.mesh, planned.plan.pipeline.axis, options, planned.plan.model, kinds, report)
    return [tried.judged for tried in search.pipelines(planned.inner)]


@dataclass(frozen=True)
class _Tried:
    judged: Judged
    inner: Planned
    micro: MicroBatched
    bound: float
    limit: float

    @property
    def fits(self) -> bool:
        return self.judged.peak_bytes <= self.limit


class _Search:
    """All that is tried with one number of micro-batches."""

    def __init__(self, micro: MicroBatched, mesh: Mesh, axis: str, options: PlanOptions, name: str,
                 kinds: list[tuple[str, int]], report: Report):  # fmt: skip
        self.micro, self.axis, self.name, self.kinds, self.report = micro, axis, name, kinds, report
        self.ranks, self.mesh = mesh.size(axis), inside(mesh, axis)
        self.limit = float(options.memory_bytes or options.hardware.memory_bytes)
        self.options = replace(options, within=mesh, micro_batches=micro.micro_batches, baselines=False, memory_bytes=None)
        self.collectives = CollectiveCost(options.hardware, mesh)
        self.report(f"{micro.micro_batches} micro-batches")
        self.tried: list[_Tried] = []
        self.bound = 0.0

    @cached_property
    def solvers(self) -> list[Solver]:
        return solvers_of(self.micro.captured, self.mesh, self.options, self.report)

    def send(self, bytes_: float) -> float:
        """Seconds of a tensor of so many bytes of a device from one stage to the next."""
        return self.collectives.seconds("send", (self.axis,), bytes_)

    def run(self) -> _Search:
        """Tries the fastest plan of a micro-batch and, until the fastest pipeline fits, plans that compute more again or hold
        less."""
        limit = math.inf
        for _ in range(MOST_LIMITS if self.options.recompute == AUTO else 1):
            try:
                inner = self.planned(limit)
            except MemoryInfeasibleError:
                break
            first = not self.tried
            if first:
                self.bound = self.micro.micro_batches * inner.chosen.bound_seconds / self.ranks
            new = self.pipelines(inner)
            self.tried += new
            fastest = min(t.judged.step_seconds for t in self.tried)
            if self.fits_within(fastest):
                break
            closest = min(new, key=lambda t: t.judged.peak_bytes)
            for again in self.computing_again(inner, closest.judged):
                self.tried += self.pipelines(again)
            if self.fits_within(fastest * NEAR_ENOUGH):
                break
            reserve = inner.problem.reserve_bytes
            share = (self.limit - reserve) / max(closest.judged.peak_bytes - reserve, 1.0)
            limit = reserve + (inner.evaluation.bytes_ - reserve) * min(LESS, share)
            if limit <= reserve:
                break
        return self

    def fits_within(self, seconds: float) -> bool:
        """Whether something was found that fits and takes no longer."""
        return any(t.fits and t.judged.step_seconds <= seconds for t in self.tried)

    def computing_again(self, inner: Planned, judged: Judged) -> Iterator[Planned]:
        """A plan with as much computed again as the fullest rank lacks for its micro-batches in flight, and with all blocks at a
        level."""
        e, solver = inner.evaluation, inner.solver
        if self.options.recompute != AUTO or e.recomputed:
            return
        memory = judged.memory[judged.fullest]
        room, held = self.limit - judged.peak_bytes + memory.get(SAVED, 0.0), memory.get(SAVED, 1.0)
        if 0 < room < held and (fitting := solver.blocks.fit(e, e.bytes_ - (1 - LESS * room / held) * e.saved_bytes)[0]):
            yield replace(inner, chosen=replace(inner.chosen, evaluation=solver.settled(fitting)))
        for level in (SELECTIVE, FULL):
            yield replace(inner, chosen=at_level(solver, inner.chosen, level))

    def planned(self, limit: float) -> Planned:
        """The fastest plan of a micro-batch that holds so many bytes at most."""
        old = self.solvers[0]
        some = min(limit, self.ranks * self.limit * 1e3)
        solvers = [Solver(s.problem, s.pricer, some, s.search, self.report, s.free.overlap) for s in self.solvers]
        for solver in solvers:
            solver.found = old.found
        options = self.options if limit == math.inf else replace(self.options, refuses=True)
        return search(self.micro.captured, self.mesh, options, self.name, self.report, solvers)

    def pipelines(self, inner: Planned) -> list[_Tried]:
        """The best cut of a plan for each schedule."""
        problem, e = inner.whole
        stages = self.ranks * max(1, min(v for _, v in self.kinds))
        pieces = chain(problem, e, inner.pricer, stages, self.send, inner.live_bytes)
        found = []
        for kind, v in self.kinds:
            if self.ranks * v > len(pieces.pieces) and len(self.kinds) > 1:
                continue
            if self.ranks * v > len(pieces.pieces):
                pieces = chain(problem, e, inner.pricer, self.ranks * v, self.send, inner.live_bytes)
            self.report(f"{kind}, {self.micro.micro_batches} micro-batches")
            found.append(_Tried(self.pipeline(inner, pieces, kind, v), inner, self.micro, self.bound, self.limit))
        return found

    def pipeline(self, inner: Planned, pieces: Chain, kind: str, v: int) -> Judged:
        """The best cut for one schedule that the judge lets fit, else the fastest that does not fit."""
        problem, e = inner.whole
        room = self.limit - problem.reserve_bytes
        first: Judged | None = None
        for _ in range(MOST_CUTS):
            try:
                cuts = self.cut(pieces, kind, v, room)
            except MemoryInfeasibleError:
                if first is not None:
                    break
                cuts, room = self.cut(pieces, kind, v, math.inf), -math.inf
            pipeline = Pipeline(self.axis, self.ranks, kind, self.micro.micro_batches, v, cuts)
            judged = judge(problem, e, inner.pricer, pipeline, self.send, inner.live_bytes)
            if first is None or judged.peak_bytes < first.peak_bytes:
                first = judged
            excess = judged.peak_bytes - self.limit
            if excess <= 0 or room < 0:
                break
            room -= excess
        return first

    def cut(self, pieces: Chain, kind: str, v: int, room: float) -> tuple[str, ...]:
        timing = timing_of(kind, self.ranks, v)
        if KINDS[kind].v_shaped:
            found = cut_stages(pieces.pieces, self.ranks * v, self.micro.micro_batches, room / v, timing, pieces.shared)
        else:
            found = cut_looped(pieces.pieces, self.ranks, self.micro.micro_batches, room, timing, pieces.shared)
        return pieces.cuts(found.cuts)


def _kinds(schedule: str, stages_per_rank: int | None) -> list[tuple[str, int]]:
    """Schedules to try, with their stages a rank. Raises StrategyError for one that there is not, or not with so many."""
    names = SCHEDULES if schedule in (None, AUTO) else (canonical(schedule),)
    found = [(name, v) for name in names if (v := stages_per_rank or KINDS[name].chunks or 2) == (KINDS[name].chunks or v)]
    found = [(name, v) for name, v in found if KINDS[name].chunks is not None or v > 1 or len(names) == 1]
    if not found:
        able = [name for name, kind in KINDS.items() if kind.chunks in (None, stages_per_rank)]
        raise StrategyError(f"{schedule} has no form with {stages_per_rank} stages a rank", fix=f"use {' or '.join(able)}")
    return found


def _check_options(options: PlanOptions, axis: str) -> None:
    for what, texts in (("pin", options.pin.values()), ("forbidden layout", (layout for _, layout in options.forbid))):
        for text in texts:
            if f"{axis}:" in text.replace(" ", ""):
                raise StrategyError(f"the {what} {text!r} shards over {axis}, which carries stages",
                                    fix=f"name the other axes, or call {axis} something else")  # fmt: skip


def _counts(captured: Captured, batch: int, mesh: Mesh, strategy: str | None,
            micro_batches: int | None) -> tuple[list[MicroBatched], list[str]]:  # fmt: skip
    """The graphs of micro-batches to try, and what is to be said of them. Raises PipelineError or MicroBatchError for a number
    that was asked for and cannot be."""
    ranks = mesh.size(axis_of(mesh))
    if micro_batches is not None:
        if not isinstance(micro_batches, int) or isinstance(micro_batches, bool) or micro_batches < 1:
            raise PipelineError(f"{micro_batches!r} is no number of micro-batches", fix="use 1 or more, such as 8")
        return [micro_batch(captured, micro_batches)], []
    divisors = [k for k in range(1, batch + 1) if batch % k == 0]
    ways = data_ways(inside(mesh), strategy)
    full = [k for k in divisors if batch // k % ways == 0] or divisors
    wanted = {next((k for k in full if k >= times * ranks), full[-1]) for times in COUNTS}
    try:
        return [micro_batch(captured, k) for k in sorted(wanted)], []
    except MicroBatchError as error:
        where = f" at {error.source}" if error.source else ""
        return [micro_batch(captured, 1)], [f"{error.message}{where}"]


def _refusal(closest: _Tried, limit: float) -> MemoryInfeasibleError:
    judged = closest.judged
    rank, pipeline = judged.fullest, judged.pipeline
    missing = judged.peak_bytes - limit
    stages = ", ".join(f"{s} ({pipeline.costs[s].name})" for s in pipeline.stages_of(rank))
    several = "s" if pipeline.stages_per_rank > 1 else ""
    label = _label(judged)
    return MemoryInfeasibleError(
        f"no pipeline was found that fits {size(limit)} a device: in the smallest ({label}) rank {rank} with stage{several} "
        f"{stages} needs {size(judged.peak_bytes)}, {size(missing)} more", missing_bytes=math.ceil(missing),
        breakdown=judged.memory[rank], mesh=closest.inner.options.within,
        fix="use more ranks along pp, more devices on its other axes, or more micro-batches",
    )  # fmt: skip


def _label(judged: Judged) -> str:
    p = judged.pipeline
    several = f", {p.stages_per_rank} stages a rank" if p.stages_per_rank > 1 else ""
    return f"{p.schedule}, {p.micro_batches} micro-batch{'es' if p.micro_batches > 1 else ''}{several}"


def _described(best: _Tried, tried: list[_Tried], captured: Captured, mesh: Mesh, warnings: list[str],
               batch: int) -> PipelinePlanned:  # fmt: skip
    judged, pipeline = best.judged, best.judged.pipeline
    inner, m, ranks = best.inner.plan, pipeline.micro_batches, pipeline.ranks
    step, rank = judged.step_seconds, judged.fullest
    if m < ranks:
        share = percent(judged.waiting_share, 1.0)
        many = f"{m} micro-batch{'es' if m > 1 else ''} for {ranks} ranks: each waits {share} of the step"
        warnings = ["; ".join([many, *warnings])]
    others = {_label(t.judged): t for t in reversed(tried)}  # of equal names the fastest that fits
    alternatives = tuple(
        Alternative(label, t.judged.step_seconds, t.judged.communication_seconds, t.judged.peak_bytes, t.fits)
        for label, t in sorted(others.items(), key=lambda pair: pair[1].judged.step_seconds) if label != _label(judged)
    )  # fmt: skip
    bound = min(best.bound, step)
    plan = replace(
        inner, mesh=mesh, pipeline=pipeline, micro_batches=1, reduces_once=False, samples=batch,
        fingerprint=fingerprint(captured.graph), memory_limit_bytes=best.limit,
        step_seconds=step, simulated_seconds=step, bound=bound, gap=1 - bound / step if step else 0.0,
        compute_seconds=inner.compute_seconds / ranks, recompute_seconds=inner.recompute_seconds / ranks,
        communication_seconds=judged.communication_seconds, exposed_seconds=_exposed(judged), peak_bytes=judged.peak_bytes,
        memory=judged.memory[rank], at_peak=judged.memory[rank], alternatives=alternatives, warnings=(*warnings, *inner.warnings),
        planning_seconds=sum({id(t.inner): t.inner.seconds for t in tried}.values()),
    )  # fmt: skip
    return PipelinePlanned(captured, plan, best.inner, best.micro, judged, tuple(t.judged for t in tried))


def _exposed(judged: Judged) -> float:
    """Seconds of a step that the mean rank spends on communication and on nothing else."""
    works = list(itertools.chain.from_iterable(part.work.values() for part in judged.parts))
    overlap = judged.parts[0].overlap
    alone = sum(w.seconds(overlap) - w.compute - w.again for w in works)
    return (alone * judged.pipeline.micro_batches + sum(judged.once_seconds)) / judged.pipeline.ranks
