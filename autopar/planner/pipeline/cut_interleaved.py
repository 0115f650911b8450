"""Cuts for schedules with several stages a rank: stage i is on rank i mod p, and a rank's stages share its time and its
memory.

So no stage can be evaluated alone, and no shortest path finds the best cut. What is exact is a rank: given the cuts,
the levels of all segments of its stages (pareto.py). Cuts are searched: from the better of two exact cuts into p v
stages that stand alone, one segment is moved from a stage to another, past those between, as long as that helps. The
bound lets segments of a kind be spread over the ranks as they like, in fractions: a linear program, so that every cut
comes with a gap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...errors import MemoryInfeasibleError
from ...utils.format import size
from .cut import check, cut_stages, fastest
from .model import RankSegments, Segment, Shared, StageCut, Timing
from .pareto import Levels, Variants
from .spans import SAME, Spans

DOUBT = 1e-7  # of the linear program's optimum


def cut_looped(
    segments: Sequence[Segment],
    ranks: int,
    micro_batches: int,
    limit_bytes: float,
    timing: Timing,
    shared: Sequence[Shared] = (),
    is_rough: bool = False,
    levels: Levels | None = None,
    others: Variants | None = None,
    spans: Spans | None = None,
) -> StageCut:
    """Return a cut into `timing.looped` stages a rank, that of `cut_stages` where that is one: how far its step is from
    the shortest at most, `bound_seconds` says. `is_rough`: where a cut of stages that stand alone fits, none that is
    better is looked for. `levels`: of the segments, if some are known; `others`: what they are under other plans, of
    which each rank may take one.

    Raise StrategyError as `cut_stages` does, and MemoryInfeasibleError, with the fullest rank of the emptiest cut that
    was found, if none was found that fits.
    """
    if timing.looped == 1:
        return cut_stages(segments, ranks, micro_batches, limit_bytes, timing, shared, levels, others)
    check(segments, ranks * timing.looped, micro_batches, timing)
    search = Loops(segments, ranks, micro_batches, limit_bytes, timing, shared, levels, others, spans)
    starts = search.starts()
    found = next(
        (found for found in map(search.evaluated, starts) if not found[0]), None
    )  # the first has the shortest longest stage
    if found is None or not is_rough:
        found = search.descend(min(map(search.evaluated, starts))[2])
    excess, step, path = found
    if excess:
        raise search.infeasible(path)
    stages = search.stages(path)
    bound = 0.0
    if not is_rough and others is None:
        bound = min(
            step, fractional_step(segments, search.levels, search.flight, micro_batches, limit_bytes, timing, shared)
        )
    return StageCut(stages, timing, micro_batches, step, search.apart(path), bound)


Costs = list[tuple[float, float]]  # (bytes too many, seconds) of a rank, by plan


class _Lists:
    """Holds what is known of every span in lists, which are read faster than arrays where few spans are asked for."""

    def __init__(self, spans: Spans):
        self.first, self.end, self.kind = spans.first.tolist(), spans.end.tolist(), spans.kind.tolist()
        self.state, self.transient, self.boundary = (
            spans.fixed[name].tolist() for name in ("state", "transient", "boundary")
        )
        self.sends = spans.sends.tolist()


class Loops:
    """The search. A path is a span for each stage, in the order of the model. `spans`: all that there are, if they are
    known."""

    def __init__(
        self,
        segments: Sequence[Segment],
        ranks: int,
        micro_batches: int,
        limit_bytes: float,
        timing: Timing,
        shared: Sequence[Shared],
        levels: Levels | None = None,
        others: Variants | None = None,
        spans: Spans | None = None,
    ):
        self.ranks, self.micro_batches, self.limit, self.timing, self.shared = (
            ranks,
            micro_batches,
            limit_bytes,
            timing,
            shared,
        )
        self.levels, self.flight = (
            levels or Levels(segments),
            [timing.in_flight(ranks, rank, micro_batches) for rank in range(ranks)],
        )
        self.spans = spans or Spans(segments, ranks * timing.looped, shared, self.levels, math.inf)
        more = others.plans if others else ()
        self.under = [(self.spans, shared), *((self.spans.under(other), other[1]) for other in more)]
        self.borders = others.borders if others else np.zeros((1, 1))
        self.lists = [_Lists(spans) for spans, _ in self.under]
        self.span = {ends: x for x, ends in enumerate(zip(self.lists[0].first, self.lists[0].end))}
        self.boundaries = sorted({0, *self.spans.end.tolist()})
        self.number = {end: i for i, end in enumerate(self.boundaries)}
        self.known: dict[tuple[int, ...], tuple[Costs, list[RankSegments]]] = {}

    def starts(self) -> list[list[int]]:
        """Return the best cuts of stages that stand alone, without a limit on their memory and with their part of the
        limit."""
        flight, found = np.array(self.flight * self.timing.looped), []
        for limit in (math.inf, self.limit / self.timing.looped):
            seconds = np.min([spans.seconds(flight, limit) for spans, _ in self.under], 0)
            found.append(fastest(self.spans, seconds, self.micro_batches, self.timing.bubble_factor)[1])
        return [path for path in found if path]

    def evaluated(self, path: list[int]) -> tuple[float, float, list[int]]:
        """Return (bytes too many, step, path) of a cut."""
        return *self.total([self.cost(rank, path) for rank in range(self.ranks)], path), path

    def descend(self, path: list[int]) -> tuple[float, float, list[int]]:
        """Improve a cut until moving no single segment makes it better: return its (bytes too many, step, path)."""
        costs = [self.cost(rank, path) for rank in range(self.ranks)]
        best, moves = self.total(costs, path), self.moves(len(path))
        last = 0  # moves since the last one that helped
        while last < len(moves):
            for low, high, way in moves:
                last += 1
                candidate = self.moved(path, low, high, way)
                if not candidate:
                    continue
                changed = {stage % self.ranks for stage in range(low - 1, high + 1)}
                new = [self.cost(rank, candidate) if rank in changed else costs[rank] for rank in range(self.ranks)]
                total = self.total(new, candidate)
                if total[0] < best[0] or total[0] == best[0] and total[1] < best[1] * (1 - SAME):
                    best, path, costs, last = total, candidate, new, 0
        return *best, path

    def moves(self, stages: int) -> list[tuple[int, int, int]]:
        """Return all moves, (first cut, last cut, step): the cuts from one to another go one boundary to the left or
        to the right."""
        return [(low, high, way) for low in range(1, stages) for high in range(low, stages) for way in (-1, 1)]

    def moved(self, path: list[int], low: int, high: int, way: int) -> list[int]:
        """Return the path after a move, [] if a stage would be left empty."""
        first, end = self.lists[0].first, self.lists[0].end
        ends = [self.boundaries[self.number[end[x]] + way] for x in path[low - 1 : high]]
        ends = [first[path[low - 1]], *ends, end[path[high]]]
        if ends[0] == ends[1] or ends[-2] == ends[-1]:
            return []
        return path[: low - 1] + [self.span[pair] for pair in zip(ends, ends[1:])] + path[high + 1 :]

    def total(self, costs: Sequence[Costs], path: Sequence[int]) -> tuple[float, float]:
        """Return (bytes too many, step) of a cut from the `costs` of its ranks, under the best plans."""
        if len(self.under) == 1:
            step = self.timing.step_seconds([seconds for ((_, seconds),) in costs], self.micro_batches)
            return sum(excess for ((excess, _),) in costs), step + self.apart(path)
        excess, step = min(self.under_plans(costs, plans) for plans in self.choices(costs))
        return excess, step + self.apart(path)

    def choices(self, costs: Sequence[Costs]) -> list[list[int]]:
        """Return plans of all ranks that are worth a look: for each rank the best one, and one for all of them."""
        ranks, plans = range(self.ranks), range(len(self.under))
        return [[k] * self.ranks for k in plans] + [[min(plans, key=costs[rank].__getitem__) for rank in ranks]]

    def under_plans(self, costs: Sequence[Costs], plans: Sequence[int]) -> tuple[float, float]:
        """Return (bytes too many, step) of a cut whose ranks have these plans."""
        found = [own[k] for own, k in zip(costs, plans)]
        times = [seconds + self.border(rank, plans) for rank, (_, seconds) in enumerate(found)]
        return sum(excess for excess, _ in found), self.timing.step_seconds(times, self.micro_batches)

    def border(self, rank: int, plans: Sequence[int]) -> float:
        """Return the seconds of a micro-batch in which a rank redistributes what ranks before it make."""
        times = self.timing.looped - (rank == 0)
        return times * float(self.borders[plans[rank - 1], plans[rank]]) if times else 0.0

    def apart(self, path: Sequence[int]) -> float:
        """Return the seconds of the reductions of parameters that two ranks have."""
        if not self.shared:
            return 0.0
        ends = self.spans.end[list(path)]
        ranks = [
            [int(np.searchsorted(ends, x, side="right")) % self.ranks for x in (o.first, o.second)] for o in self.shared
        ]
        return float(sum(o.seconds for o, (a, b) in zip(self.shared, ranks) if a != b))

    def cost(self, rank: int, path: Sequence[int]) -> Costs:
        """Return (bytes too many, seconds) of a rank under each plan."""
        return self._rank(rank, path)[0]

    def _rank(self, rank: int, path: Sequence[int]) -> tuple[Costs, list[RankSegments]]:
        own = tuple(path[rank :: self.ranks])
        if (rank, *own) not in self.known:
            stages = [self.stage(rank, path, k, counted=False) for k in range(len(self.under))]
            costs = [(max(0.0, one.total_bytes - self.limit), one.seconds) for one in stages]
            self.known[rank, *own] = costs, stages
        return self.known[rank, *own]

    def excess(self, path: Sequence[int], plans: Sequence[int]) -> float:
        """Return the bytes of all ranks that a cut has too many under these plans of ranks, inf where one cannot be
        given what another one makes."""
        if not all(math.isfinite(self.border(rank, plans)) for rank in range(self.ranks)):
            return math.inf
        return sum(self.cost(rank, path)[k][0] for rank, k in enumerate(plans))

    def stages(
        self, path: Sequence[int], plans: Sequence[int] | None = None, counted: bool = True
    ) -> tuple[RankSegments, ...]:
        """Return the stages of all ranks under some plans, by default the best ones; `counted`: with their levels."""
        if plans is None:
            costs = [self.cost(rank, path) for rank in range(self.ranks)]
            plans = min(self.choices(costs), key=lambda plans: self.under_plans(costs, plans))
        found = []
        for rank, k in enumerate(plans):
            one = self.stage(rank, path, k) if counted else self._rank(rank, path)[1][k]
            border = self.border(rank, plans)
            found.append(replace(one, seconds=one.seconds + border) if border else one)
        return tuple(found)

    def path(self, cut: StageCut) -> list[int]:
        """Return the path of a cut."""
        return [self.span[span] for span in sorted(span for stage in cut.stages for span in stage.spans)]

    def stage(self, rank: int, path: Sequence[int], plan: int = 0, counted: bool = True) -> RankSegments:
        """Return all stages of a rank as one under a plan, at its most frugal if that does not fit. `counted`: with its
        levels."""
        own, (spans, shared), flight = path[rank :: self.ranks], self.under[plan], self.flight[rank]
        known, levels = self.lists[plan], spans.levels
        ends = tuple((known.first[x], known.end[x]) for x in own)
        state, boundary = sum(known.state[x] for x in own), sum(known.boundary[x] for x in own)
        transient = max(known.transient[x] for x in own)
        for one in shared:
            a, b = ([first <= x < end for first, end in ends] for x in (one.first, one.second))
            state -= one.bytes_ * (any(a) and any(b) and a != b)  # a span that has both counts them once already
        frontier = levels.frontier(spans.counts[[known.kind[x] for x in own]].sum(0))
        room = (self.limit - state - transient - boundary) / flight
        point = max(0, int(frontier.bytes_.searchsorted(room, side="right")) - 1)
        activations = float(flight * frontier.bytes_[point])
        bytes_ = {"state": state, "transient": transient, "boundary": boundary, "activations": activations}
        seconds = float(frontier.seconds[point]) + sum(known.sends[x] for x in own)
        return RankSegments(ends, seconds, flight, bytes_, levels.counted(frontier, point) if counted else {}, plan)

    def infeasible(self, path: Sequence[int]) -> MemoryInfeasibleError:
        """Return the error for a cut that does not fit, with its fullest rank."""
        rank = max(range(self.ranks), key=lambda r: self.cost(r, path)[0][0])
        stage, missing = self.stage(rank, path), math.ceil(self.cost(rank, path)[0][0])
        return MemoryInfeasibleError(
            f"no cut was found that fits {size(self.limit)} with {self.timing.name}: in the emptiest, rank {rank} "
            f"needs {size(stage.total_bytes)}, {size(missing)} more than there are",
            missing_bytes=missing,
            breakdown=stage.bytes_,
            fix="use more ranks, smaller micro-batches, or a schedule with fewer in flight",
        )


def fractional_step(
    segments: Sequence[Segment],
    levels: Levels,
    flight: Sequence[float],
    micro_batches: int,
    limit: float,
    timing: Timing,
    shared: Sequence[Shared],
) -> float:
    """Bound the step of every cut from below: segments may be divided and be on any rank, with no shared parameter
    twice, the least transient of all and the cheapest cuts around every stage."""
    from ortools.math_opt.python import mathopt

    model, amount = mathopt.Model(), [0.0] * len(levels.kinds)
    slowest, times = model.add_variable(lb=0.0), []
    cuts = [segment for segment in segments[:-1] if segment.may_cut_after]
    forward, backward = (min(segment.boundary_seconds[way] for segment in cuts) for way in (0, 1))
    least = min(segment.boundary_bytes for segment in cuts)
    room = limit + sum(one.bytes_ for one in shared) - min(segment.transient_bytes for segment in segments)
    for rank, in_flight in enumerate(flight):
        before, after = timing.looped - (rank == 0), timing.looped - (rank == len(flight) - 1)  # how many cuts it is at
        seconds, bytes_ = [], []
        for k, kind in enumerate(levels.kinds):
            state = min(segment.state_bytes for segment in segments if segment.kind == kind.kind)
            for level in kind.levels:
                x = model.add_variable(lb=0.0)
                amount[k] += x
                seconds.append(level.seconds * x)
                bytes_.append((state + in_flight * level.activation_bytes) * x)
        times.append(mathopt.fast_sum(seconds) + before * backward + after * forward)
        model.add_linear_constraint(times[-1] <= slowest)
        model.add_linear_constraint(mathopt.fast_sum(bytes_) <= room - (before + after) * least)
    for k, count in enumerate(levels.before[-1].tolist()):
        model.add_linear_constraint(amount[k] == count)
    model.minimize((micro_batches - timing.bubble_factor) * slowest + timing.bubble_factor * mathopt.fast_sum(times))
    return mathopt.solve(model, mathopt.SolverType.GLOP).objective_value() * (1 - DOUBT)
