"""Plan a pipeline: how many micro-batches, how each is sharded inside a stage, where stages begin, in which order they
run.

Every number of micro-batches is a search of its own (autopar/planner/pipeline/search.py); the most promising pipelines
are evaluated, and the fastest of those whose fullest rank fits is the plan. What is proven: no plan of a micro-batch
takes less than the search's bound, so no pipeline with as many of them takes less than that, divided over the ranks
with nobody waiting. The gap to that bound is mostly the bubble; that no other combination is faster is not proven.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ...errors import AutoparError, MemoryInfeasibleError, MeshError, MicroBatchError, PipelineError, StrategyError
from ...frontend.export import Captured
from ...ir.graph import fingerprint
from ...ir.mesh import Mesh
from ...plans.entries import Alternative, Collective, ExpertCopies, Routing
from ...plans.pipeline import AXIS, axis_of, inside
from ...plans.plan import Plan
from ...schedule.actions import Schedule
from ...schedule.catalogue import KINDS, canonical
from ...utils.format import percent, size
from ...utils.gc_pause import paused_collector
from ..objective.evaluate import Transfer
from ..solver.minimize import ILP
from ..spmd.batch import data_ways, samples_of
from ..spmd.describe import collectives_of_transfers
from ..spmd.fixed_recompute import AUTO
from ..spmd.outputs import outputs_in
from ..spmd.plan_options import PlanOptions
from ..spmd.planned import Planned
from .baselines import evaluated_if_faster, experts
from .beside_exchange import fastest_with_exchanges
from .candidate import Candidate
from .chunk_counts import chunk_counts
from .estimate import Estimate
from .evaluate import PipelineCost
from .mapping import evaluated_if_near, mapped
from .on_host import described_in_stages, with_values_on_host, without_copies
from .pairs import fastest_in_pairs
from .search import PipelineSearch
from .shardings import stage_shardings
from .stage_costs import parts_of_nodes, parts_of_transfer
from .stage_plans import plans_by_stage

COUNTS = (0.5, 1, 2, 4)  # micro-batches a rank that are tried if no number is asked for, and as many as there can be

Report = Callable[[str], None]


@dataclass(frozen=True)
class Staged:
    """The stages that a search found: the plan, what it costs stage by stage, and all candidates."""

    plan: Plan
    evaluated: PipelineCost
    candidates: tuple[PipelineCost, ...]
    best: Candidate


@paused_collector()
def plan_pipeline(
    captured: Captured,
    mesh: Mesh,
    options: PlanOptions,
    name: str = "model",
    *,
    schedule: str | Schedule = AUTO,
    micro_batches: int | None = None,
    stages_per_rank: int | None = None,
    sequence_chunks: int | None = None,
    report: Report = lambda text: None,
) -> Planned:
    """Find the best pipeline for the captured graph of a whole batch, over the axis pp of a mesh; `options` are those
    of the rest of the mesh. None and "auto" leave a choice to the search. Raise MeshError, PipelineError,
    MicroBatchError, StageError, StrategyError, and MemoryInfeasibleError with the fullest rank of what came closest."""
    axis = axis_of(mesh)
    if axis is None:
        raise MeshError(f"mesh {mesh} has no axis pp of more than one device", fix="name one: pp=2,dp=4")
    _check_options(options, axis)
    options.check(inside(mesh, axis))
    kinds = kinds_of(schedule, stages_per_rank)
    given = KINDS[kinds[0][0]].given
    if given is not None and micro_batches is None:
        micro_batches = given.micro_batches
    batch = samples_of(captured.signature)
    searches, warnings = _searches(captured, batch, mesh, options, micro_batches, kinds, name, report, sequence_chunks)
    estimates = [one for search in searches for one in search.estimates()]
    candidates = evaluated(estimates)
    more = _beside_misjudged(estimates, candidates)
    candidates = evaluated(more, candidates)
    if not candidates[0].fits:
        smaller = candidates[0].search.smaller(candidates[0].estimate)
        candidates = evaluated(smaller, candidates)
        more += smaller
    estimates += more
    mapping = mapped(candidates[0], estimates)
    candidates = with_plans_by_stage([*estimates, *mapping], candidates)
    near = evaluated_if_near(mapping, candidates[0].evaluated.step_seconds if candidates[0].fits else math.inf)
    candidates = by_seconds([*candidates, *near])
    candidates = by_seconds([*candidates, *candidates[0].search.from_elsewhere(candidates[0])])
    candidates = with_values_on_host(estimates, candidates)
    if not candidates[0].fits and options.refuses:
        raise _refusal(candidates[0], candidates[0].limit)
    others = experts(candidates[0]) if options.baselines and candidates[0].fits else {}
    fastest = candidates[0].evaluated.step_seconds
    others = {name: evaluated_if_faster(one, fastest) for name, one in others.items()}  # never worse than one
    candidates = by_seconds([*candidates, *(one for one in others.values() if isinstance(one, Candidate))])
    candidates = fastest_in_pairs(candidates, fastest_with_exchanges(candidates))
    return described(candidates[0], candidates, captured, mesh, warnings, batch, others)


def _beside_misjudged(estimates: Sequence[Estimate], candidates: Sequence[Candidate]) -> list[Estimate]:
    """Estimate what was left out beside pipelines that were estimated to fit and to be faster than all that do, and do
    not fit."""
    fastest = candidates[0].evaluated.step_seconds if candidates[0].fits else math.inf
    held = {one.estimate.key: one.evaluated.peak_bytes for one in candidates if not one.fits}
    wrong = [one for one in estimates if one.fits and one.step_seconds < fastest and one.key in held]
    more: list[Estimate] = []
    for search in dict.fromkeys(one.search for one in wrong):
        known = [one for one in estimates if one.search is search]
        for i, one in enumerate(known):
            if one in wrong:
                known[i] = replace(one, fits=False, step_seconds=one.least_seconds, peak_bytes=held[one.key])
        more += search.estimates(known)
    return more


def with_plans_by_stage(estimates: Sequence[Estimate], candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return candidates, the best first, with those pipelines that may be faster than all of them if each stage takes
    another one of the plans of a micro-batch that were estimated."""
    by_search: dict[PipelineSearch, list[Estimate]] = {}
    for one in estimates:
        by_search.setdefault(one.search, []).append(one)
    return evaluated([one for search, own in by_search.items() for one in plans_by_stage(search, own)], candidates)


def evaluated(estimates: Sequence[Estimate], others: Sequence[Candidate] = ()) -> list[Candidate]:
    """Evaluate the most promising estimates and return them with `others`, the best first: those that fit by their
    seconds, then others by their bytes. With one schedule of a number of micro-batches all of its schedules are
    evaluated; another number, and other plans for the same schedule, only if they may be faster than all of those."""
    candidates = [*others]
    cut: set[PipelineSearch] = set()
    known: set[tuple[PipelineSearch, str, int]] = set()
    for one in sorted(estimates, key=promise):
        key = (one.search, one.schedule, one.stages_per_rank)
        fastest = min((t.evaluated.step_seconds for t in candidates if t.fits), default=math.inf)
        may_be_faster = one.fits and one.step_seconds < fastest
        if may_be_faster or key not in known and (one.search in cut or fastest == math.inf):
            candidates.append(one.search.evaluated(one))
            cut.add(one.search)
            known.add(key)
    return by_seconds(candidates)


def by_seconds(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return candidates, the best first: those that fit by their seconds, then others by their bytes."""
    return sorted(candidates, key=lambda t: (0, t.evaluated.step_seconds) if t.fits else (1, t.evaluated.peak_bytes))


def promise(one: Estimate) -> tuple:
    """Return the key that sorts estimates by what they promise: those that fit by seconds, then others by bytes."""
    return (0, one.step_seconds) if one.fits else (1, one.peak_bytes)


def with_schedules(staged: Staged, kinds: list[tuple[str, int]]) -> list[PipelineCost]:
    """Evaluate other schedules, with their stages a rank, for the plans of a micro-batch that are there already, each
    with its best cut. Leave out those that need more stages than there are segments."""
    return [candidate.evaluated for candidate in staged.best.search.with_kinds(staged.best, kinds)]


def kinds_of(schedule: str | Schedule, stages_per_rank: int | None) -> list[tuple[str, int]]:
    """Return the schedules to try, with their stages a rank. Raise StrategyError for one that there is not, or not with
    so many."""
    searched = [name for name, kind in KINDS.items() if kind.searched]
    names = searched if schedule in (None, AUTO) else [canonical(schedule)]
    found = [
        (name, v) for name in names if (v := stages_per_rank or KINDS[name].chunks or 2) == (KINDS[name].chunks or v)
    ]
    found = [(name, v) for name, v in found if KINDS[name].chunks is not None or v > 1 or len(names) == 1]
    if not found:
        able = [name for name, kind in KINDS.items() if kind.chunks in (None, stages_per_rank)]
        raise StrategyError(
            f"{schedule} has no form with {stages_per_rank} stages a rank", fix=f"use {' or '.join(able)}"
        )
    return found


def check_solver(options: PlanOptions) -> None:
    """Raise StrategyError for a solver that knows no stages."""
    if options.search.solver == ILP:
        raise StrategyError(
            f"solver {ILP} finds plans for one mesh without stages", fix=f"leave it out, or name a mesh without {AXIS}"
        )


def _check_options(options: PlanOptions, axis: str) -> None:
    check_solver(options)
    for what, texts in (("pin", options.pin.values()), ("forbidden layout", (layout for _, layout in options.forbid))):
        for text in texts:
            if f"{axis}:" in text.replace(" ", ""):
                raise StrategyError(
                    f"the {what} {text!r} shards over {axis}, which carries stages",
                    fix=f"name the other axes, or call {axis} something else",
                )


def _searches(
    captured: Captured,
    batch: int,
    mesh: Mesh,
    options: PlanOptions,
    micro_batches: int | None,
    kinds: list[tuple[str, int]],
    name: str,
    report: Report,
    sequence_chunks: int | None,
) -> tuple[list[PipelineSearch], list[str]]:
    """Return a search for each number of micro-batches to try, and of chunks of their rows, and what is to be said of
    them. Raise PipelineError or MicroBatchError for a number that was asked for and cannot be."""

    def search(count: int, chunks: int = sequence_chunks or 1) -> PipelineSearch:
        return PipelineSearch(captured, count * chunks, mesh, options, name, kinds, report, chunks)

    ranks = mesh.size(axis_of(mesh))
    if micro_batches is not None:
        if not isinstance(micro_batches, int) or isinstance(micro_batches, bool) or micro_batches < 1:
            raise PipelineError(f"{micro_batches!r} is no number of micro-batches", fix="use 1 or more, such as 8")
        return [search(micro_batches)], []
    divisors = [k for k in range(1, batch + 1) if batch % k == 0]
    ways = data_ways(inside(mesh), options.strategy)
    full = [k for k in divisors if batch // k % ways == 0] or divisors
    wanted = {full[-1], *(next((k for k in full if k >= times * ranks), full[-1]) for times in COUNTS)}
    try:
        searches = [search(k) for k in sorted(wanted)]
    except MicroBatchError as error:
        where = f" at {error.source}" if error.source else ""
        return [search(1)], [f"{error.message}{where}"]
    if sequence_chunks is None and any(v == 1 for _, v in kinds) and KINDS[kinds[0][0]].given is None:
        with contextlib.suppress(MicroBatchError):  # a model whose rows cannot be cut
            searches += [search(full[-1], chunks) for chunks in chunk_counts(captured, full[-1], ranks)]
    return searches, []


def _refusal(closest: Candidate, limit: float) -> MemoryInfeasibleError:
    evaluated = closest.evaluated
    rank, pipeline = evaluated.fullest, evaluated.pipeline
    missing = evaluated.peak_bytes - limit
    stages = ", ".join(f"{s} ({pipeline.costs[s].name})" for s in pipeline.stages_of(rank))
    several = "s" if pipeline.stages_per_rank > 1 else ""
    label = _label(evaluated)
    return MemoryInfeasibleError(
        f"no pipeline was found that fits {size(limit)} a device: in the smallest ({label}) rank {rank} with "
        f"stage{several} {stages} needs {size(evaluated.peak_bytes)}, {size(missing)} more",
        missing_bytes=math.ceil(missing),
        breakdown=evaluated.memory[rank],
        mesh=closest.inner.options.within,
        fix="use more ranks along pp, more devices on its other axes, or more micro-batches",
    )


def _label(evaluated: PipelineCost) -> str:
    p = evaluated.pipeline
    told = (p.stages_per_rank, "stages a rank"), (p.row_chunks, "chunks a row")
    many = [f", {count} {what}" for count, what in told if count > 1]
    return f"{p.schedule}, {p.micro_batches} micro-batch{'es' if p.micro_batches > 1 else ''}{''.join(many)}"


def described(
    best: Candidate,
    candidates: list[Candidate],
    captured: Captured,
    mesh: Mesh,
    warnings: list[str],
    batch: int,
    others: Mapping[str, Estimate | Candidate | AutoparError] | None = None,
) -> Planned:
    """Describe the best pipeline as a plan, with the other candidates as its alternatives. `others`: strategies of
    experts, as they are told beside the plan."""
    evaluated, pipeline = best.evaluated, best.evaluated.pipeline
    inner, m, ranks = best.inner.plan, pipeline.micro_batches, pipeline.ranks
    step, rank = evaluated.step_seconds, evaluated.fullest
    if m < ranks:
        share = percent(evaluated.waiting_share, 1.0)
        many = f"{m} micro-batch{'es' if m > 1 else ''} for {ranks} ranks: each waits {share} of the step"
        warnings = ["; ".join([many, *warnings])]
    by_label = {_label(t.evaluated): t for t in reversed(candidates)}  # of equal names the fastest that fits
    alternatives = [
        Alternative(label, t.evaluated.step_seconds, t.evaluated.communication_seconds, t.evaluated.peak_bytes, t.fits)
        for label, t in sorted(by_label.items(), key=lambda pair: pair[1].evaluated.step_seconds)
        if label != _label(evaluated)
    ]
    alternatives += [_alternative(name, one) for name, one in (others or {}).items()]
    bound = min(best.bound, step)
    plan = replace(
        inner,
        mesh=mesh,
        pipeline=pipeline,
        reduces_once=m > 1,
        samples=batch,
        fingerprint=fingerprint(captured.graph),
        collectives=_collectives(best),
        memory_limit_bytes=best.limit,
        step_seconds=step,
        bound=bound,
        gap=1 - bound / step if step else 0.0,
        compute_seconds=inner.compute_seconds * best.search.plans.share / ranks,
        recompute_seconds=inner.recompute_seconds * best.search.plans.share / ranks,
        update_seconds=evaluated.parameter_seconds,
        attentions=tuple(replace(one, sent_bytes=one.sent_bytes / ranks) for one in inner.attentions),
        routing=_routing(best),
        expert_copies=_copies(best),
        flops=inner.flops.times(sum(pipeline.shares) / sum(inner.pipeline.shares)),
        outputs=outputs_in(inner.sharding, best.inner.whole[0], best.inner.pricer, captured),
        shardings=stage_shardings(*best.inner.whole, pipeline.cuts, best.of_stage),
        unmade_bytes=evaluated.unmade_bytes,
        communication_seconds=evaluated.communication_seconds,
        exposed_seconds=_exposed(without_copies(best)),
        saved_on_host=described_in_stages(best),
        peak_bytes=evaluated.peak_bytes,
        memory=evaluated.memory[rank],
        at_peak=evaluated.memory[rank],
        alternatives=tuple(alternatives),
        warnings=(*warnings, *inner.warnings),
        planning_seconds=sum({t.inner: t.inner.seconds for t in candidates}.values()),
    )
    staged = Staged(plan, evaluated, tuple(t.evaluated for t in candidates), best)
    return replace(best.inner, captured=captured, micro=best.micro, staged=staged)


def _collectives(best: Candidate) -> tuple[Collective, ...]:
    """Return the collectives of all stages: each that has a parameter moves it, and its part of the gradient."""
    (problem, e), inner, pipeline = best.inner.whole, best.inner, best.evaluated.pipeline
    where = parts_of_nodes(problem.placement(pipeline.cuts))

    def stages(transfer: Transfer) -> int:
        return max(1, parts_of_transfer(problem, where, transfer).bit_count())

    more = {
        (one.kind, one.axes, one.phase): one
        for one in collectives_of_transfers(problem, e, lambda transfer: stages(transfer) - 1)
    }
    return tuple(
        replace(
            one,
            count=one.count + again.count,
            wire_bytes=one.wire_bytes + again.wire_bytes,
            seconds=one.seconds + again.seconds,
        )
        if (again := more.get((one.kind, one.axes, one.phase)))
        else one
        for one in inner.plan.collectives
    )


def _routing(best: Candidate) -> Routing | None:
    """Return what is assumed of routing where the layers are on several ranks."""
    inner, pipeline = best.inner.plan.routing, best.evaluated.pipeline
    if inner is None:
        return None
    sent, gathered = (bytes_ / pipeline.ranks for bytes_ in (inner.sent_bytes, inner.gathered_bytes))
    beside = best.inner.whole[1].travelling_seconds * sum(pipeline.shares) / pipeline.ranks
    gained = best.gained_seconds
    return Routing(inner.load, 0.0, sent, gathered, beside_seconds=beside, gained_seconds=gained)


def _copies(best: Candidate) -> ExpertCopies | None:
    """Return what copies of experts cost a rank on average."""
    inner, ranks = best.inner.plan.expert_copies, best.evaluated.pipeline.ranks
    return inner and replace(inner, sent_bytes=inner.sent_bytes / ranks, seconds=inner.seconds / ranks)


def _alternative(name: str, one: Estimate | Candidate | AutoparError) -> Alternative:
    if isinstance(one, AutoparError):
        return Alternative(name, None, None, None, False, one.message)
    if isinstance(one, Estimate):
        return Alternative(name, one.step_seconds, None, one.peak_bytes, one.fits)
    return Alternative(
        name, one.evaluated.step_seconds, one.evaluated.communication_seconds, one.evaluated.peak_bytes, one.fits
    )


def _exposed(evaluated: PipelineCost) -> float:
    """Return the seconds of a step that the mean rank spends on communication and on nothing else."""
    works = itertools.chain.from_iterable(part.work.values() for part in evaluated.parts)
    alone = sum(part.forward_seconds + part.backward_seconds for part in evaluated.parts)
    alone -= sum(w.compute + w.recompute for w in works)
    once = sum(evaluated.tied_seconds) + sum(part.once_waited_seconds for part in evaluated.parts)
    return (max(0.0, alone) * sum(evaluated.pipeline.shares) + once) / evaluated.pipeline.ranks
