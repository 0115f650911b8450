"""Pipelines whose stages keep values on the host between a micro-batch's forward and its backward.

A rank with f micro-batches in flight frees f times what it copies for one of them, and the copies hide behind what its
stages compute meanwhile: so much is free of charge, and so much less has to be computed again. Pipelines that would be
fast if memory had no limit are made to fit so: with some bytes a micro-batch on the host, on each rank that holds more
than it may, and the rest computed again; several amounts are tried. No pipeline is slower for it. The last block of a
stage keeps its values, and so do stages whose backwards are split: what weights wait for they would hold as before.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from ...cost.compute import FREE
from ...hardware.profile import Host
from ...plans.pipeline import Pipeline
from ...plans.saved_on_host import SavedOnHost
from ...schedule.played import Played
from ..objective.checkpoint_blocks import Blocks, recomputed_vertices
from ..objective.evaluate import Evaluation
from ..objective.host_values import HostValue, may_wait_on_host, saved_on_host, taken
from ..objective.memory_timeline import LiveBytes, live_bytes
from ..problem.offload import ACTIVATIONS, AUTO
from ..problem.problem import Problem
from ..spmd.values_on_host import names_of
from .best_cut import best_cut
from .candidate import Candidate
from .checkpoint import StageRecomputation
from .estimate import Estimate
from .evaluate import PipelineCost
from .stage_costs import parts_of_nodes

SHARES = (0.25, 0.5, 0.7, 0.85, 1.0, 2.0)  # of the bytes that a stage can hide, which are tried
MOST_TRIES = 6  # to make one amount fit: what passes by is known afterwards only
MOST_TRIED, MOST_FITTED = 12, 3  # pipelines, those that would be fastest if memory had no limit
FASTER, LESS = 1.3, 0.15  # of what is missing then, and of all that is not computed again: so much less the next time
MARGIN = 1.05  # of the bytes that are missing, which the host takes at most


def with_values_on_host(estimates: Sequence[Estimate], candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return some candidates, which are sorted, with pipelines before them that keep values on the host, fit and are
    faster than all of them, made of these and of what was estimated: none where the plan may keep nothing there."""
    fastest = candidates[0].evaluated.step_seconds if candidates[0].fits else math.inf
    found: list[Candidate] = []
    fitted = 0
    for one in itertools.islice(_without_limit(estimates, candidates, fastest), MOST_TRIED):
        if one.evaluated.step_seconds < fastest and fitted < MOST_FITTED:
            made = Stages(one).fitted()
            found += [other for other in made if other.evaluated.step_seconds < fastest]
            fastest = min([fastest, *(other.evaluated.step_seconds for other in found)])
            fitted += bool(made)
    return [*sorted(found, key=lambda made: made.evaluated.step_seconds), *candidates]


def _without_limit(
    estimates: Sequence[Estimate], candidates: Sequence[Candidate], fastest: float
) -> Iterator[Candidate]:
    """Iterate over pipelines as if memory had no limit, with the cuts of candidates and with the best cut that there
    is then. Those first that may fit by recomputation too, as parameters and gradients leave room for that, by their
    seconds; then others by the bytes that they miss."""
    cuts: dict[tuple, list[Pipeline]] = {}
    for candidate in candidates:
        if not candidate.of_stage:
            cuts.setdefault(candidate.estimate.key, []).append(candidate.evaluated.pipeline)
    seen = set()
    for one in sorted(estimates, key=lambda one: (0, one.least_seconds) if one.fits else (1, one.peak_bytes)):
        if may_keep(one) and one.least_seconds < fastest and one.key not in seen:
            seen.add(one.key)
            inner, segments, _ = one.search.prepared(one.inner)
            roomy = best_cut(one.search, segments, one.schedule, one.stages_per_rank, math.inf)
            best = one.search.pipeline(one.schedule, one.stages_per_rank, segments.cuts(roomy.cuts))
            for pipeline in (*cuts.get(one.key, ()), best):
                yield Candidate(one.search.as_it_is(inner, pipeline)[0], one.inner, inner, one.search)


def may_keep(one: Estimate) -> bool:
    """Return whether the stages of a pipeline may keep values on the host."""
    options = one.search.plans.options
    if options.offload not in (AUTO, ACTIVATIONS) or options.hardware.host is None or one.others:
        return False
    stages = one.search.ranks * one.stages_per_rank
    orders = one.search.pipeline(one.schedule, one.stages_per_rank, ("",) * (stages - 1)).orders
    return not any(action.kind == "W" for order in orders.orders for action in order)


@dataclass(frozen=True)
class Stages:
    """The stages of a pipeline that was evaluated without a limit on its memory."""

    one: Candidate

    @cached_property
    def problem(self) -> Problem:
        """Return the problem of the whole graph of a micro-batch."""
        return self.one.inner.whole[0]

    @cached_property
    def recomputation(self) -> StageRecomputation | None:
        """Return what may be computed again, None if that is not left to the search."""
        return self.one.search.prepared(self.one.base)[2]

    @property
    def plain(self) -> PipelineCost:
        """Return what the pipeline costs as it is."""
        return self.one.evaluated

    @property
    def limit(self) -> float:
        """Return the bytes that a rank may hold."""
        return self.one.limit

    @property
    def host(self) -> Host:
        """Return the host beside each device."""
        host = self.one.search.plans.options.hardware.host
        assert host is not None  # who makes these has looked
        return host

    @property
    def speed(self) -> float:
        """Return the bytes a second that go to the host, or come from there."""
        return self.host.link_bytes_per_second

    def fitted(self) -> list[Candidate]:
        """Return pipelines that fit, one for each amount of bytes on the host with which one does, if that frees
        memory that is missing: with little there, or with all that can be."""
        if self.plain.peak_bytes <= self.limit:
            return []
        least = self._with(self._amounts(SHARES[0]))
        shares = SHARES[1:] if least is not None else (math.inf,)
        made = [least, *(self._with(self._amounts(share)) for share in shares)]
        return [one for one in made if one is not None]

    def _amounts(self, share: float) -> list[float]:
        """Return by stage the bytes of a micro-batch that are to be on the host, where its rank is not to have more
        there than it misses."""
        amounts = [
            min(share * self.speed * min(part.forward_seconds, part.backward_seconds), able)
            for part, able in zip(self.plain.parts, self.able_bytes)
        ]
        for rank, memory in enumerate(self.plain.memory):
            excess, freed = max(0.0, sum(memory.values()) - self.limit), self._held(rank, amounts)
            for s in self.plain.pipeline.stages_of(rank):
                amounts[s] *= min(1.0, MARGIN * excess / freed) if freed else 0.0
        return amounts

    @cached_property
    def able_bytes(self) -> list[float]:
        """Return by stage the bytes of a micro-batch that may be on the host if nothing is computed again."""
        able = self._able(self.one.inner.whole[1])
        return [sum(value.bytes_ for value in able.get(s, ())) for s in range(len(self.plain.parts))]

    def _held(self, rank: int, amounts: Sequence[float]) -> float:
        """Return the bytes that a rank holds at most of so many bytes of each stage and micro-batch in flight."""
        return replace(self.plain.played, activation=tuple(amounts)).peak(rank)

    def _with(self, amounts: list[float]) -> Candidate | None:
        """Return the pipeline with about so many bytes of each stage on the host, and what else is missing computed
        again; None if that does not fit."""
        pipeline = self.plain.pipeline
        left = [self._held(rank, amounts) for rank in range(pipeline.ranks)]  # bytes not to compute again
        for _ in range(MOST_TRIES):
            _, e = self.one.inner.whole
            if self.recomputation is not None:
                limits = [self.limit + bytes_ for bytes_ in left]
                e = self.recomputation.more(e, self.plain, limits) or self.recomputation.all()
            able = self._able(e)
            e = saved_on_host(e, [value for s, values in able.items() for value in taken(values, amounts[s])])
            cost = evaluated_with(self.one, e)
            excess = [sum(memory.values()) - self.limit for memory in cost.memory]
            if max(excess) <= 0:
                return self._candidate(e, cost) if max(_held_there(cost).peaks) <= self.host.memory_bytes else None
            for rank, more in enumerate(excess):
                if more > 0:  # less stays on the device, what is there for others to pass by included
                    held = max(self._held(rank, amounts), 1.0)
                    left[rank] -= max(FASTER * more, LESS * left[rank])
                    for s in pipeline.stages_of(rank):
                        amounts[s] *= 1 + more / held
        return None

    def _able(self, e: Evaluation) -> dict[int, list[HostValue]]:
        """Return by stage the values that may be on the host, the largest ones first."""
        blocks = Blocks(self.problem, replace(self.one.inner.pricer, problem=self.problem))
        where = _Where(self.problem, e, self.plain.pipeline, blocks)
        found: dict[int, list[HostValue]] = {}
        for value in may_wait_on_host(blocks, e, self.speed):
            if (stage := where.stage_of(value)) is not None:
                found.setdefault(stage, []).append(value)
        return found

    def _candidate(self, e: Evaluation, cost: PipelineCost) -> Candidate:
        inner = replace(
            self.one.inner, written=(self.problem, e), held=live_bytes(self.problem, e, self.one.inner.pricer)
        )
        return replace(self.one, evaluated=cost, inner=inner)


class _Where:
    """The stages of values that one stage alone makes and reads."""

    def __init__(self, problem: Problem, e: Evaluation, pipeline: Pipeline, blocks: Blocks):
        self.problem, self.e, self.blocks = problem, e, blocks
        self.recomputed = recomputed_vertices(e)
        self.parts: dict[fx.Node, int] = parts_of_nodes(problem.placement(pipeline.cuts))
        self.last: dict[int, str] = {}  # by stage, as bits, its last block
        for v in problem.vertices:
            if v.kind == "op" and v.phase == "forward" and blocks.block[v.index]:
                self.last[self.parts.get(v.node, 0)] = blocks.block[v.index]

    def stage_of(self, value: HostValue) -> int | None:
        """Return the stage of a value, None if several make or read it, or if its last block does."""
        v, output, _ = value.key
        stage = self.parts.get(self.problem.vertices[v].node, 0)
        is_last = self.last.get(stage) in (self.blocks.block[v], value.reader)
        if stage.bit_count() != 1 or is_last or any(part != stage for part in self._readers(v, output)):
            return None
        return stage.bit_length() - 1

    def _readers(self, v: int, output: int) -> Iterator[int]:
        """Iterate over the parts of what reads a value, or a view of it, in the backward."""
        for use in self.problem.uses_of[v, output]:
            consumer = self.problem.vertices[use.consumer]
            if consumer.kind != "op":
                continue
            if use.phase == "backward" or use.consumer in self.recomputed:
                yield self.parts.get(consumer.node, 0)
            elif consumer.node.target in FREE:
                for other in range(len(consumer.values)):
                    yield from self._readers(use.consumer, other)


def evaluated_with(one: Candidate, e: Evaluation, live: LiveBytes | None = None) -> PipelineCost:
    """Evaluate a pipeline under another evaluation of its plan of the whole graph; `live`: its memory, if it is
    known."""
    cost = one.evaluated
    return one.search.judged(one.inner, e, cost.pipeline, not cost.unmade_bytes, live)


def _held_there(cost: PipelineCost) -> Played:
    """Return the played schedule with what the host has of a micro-batch in each stage."""
    return replace(cost.played, activation=tuple(part.host_bytes for part in cost.parts))


def without_copies(one: Candidate) -> PipelineCost:
    """Evaluate a pipeline as if copies to the host and back took no time."""
    e = one.inner.whole[1]
    if not e.on_host:
        return one.evaluated
    return evaluated_with(one, replace(e, on_host=tuple(replace(value, seconds=0.0) for value in e.on_host)))


def described_in_stages(one: Candidate) -> SavedOnHost | None:
    """Return what the stages of a pipeline have on the host, of the rank that has most there, in seconds of a step of
    the mean rank; None if that is nothing."""
    problem, e = one.inner.whole
    if not e.on_host:
        return None
    pipeline = one.evaluated.pipeline
    seconds = e.host_seconds * sum(pipeline.shares) / pipeline.ranks
    exposed = one.evaluated.step_seconds - without_copies(one).step_seconds
    return SavedOnHost(names_of(problem, e), max(_held_there(one.evaluated).peaks), seconds, max(0.0, exposed))
