"""Explain why a pipeline has its micro-batches, its schedule and its cuts: what others would cost.

    micro-batches   the same schedule with half and twice as many, each planned anew
    schedules       every other one of the catalogue, with its best cut, for the same plan of a micro-batch
    cuts            equally many segments in every stage; each border one segment earlier or later; else the same

A step is what the mean rank works, reduces of gradients after its last action, and waits: these add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..cost.collectives import CollectiveCost
from ..errors import AutoparError
from ..plans.pipeline import Pipeline
from ..plans.plan import Plan
from ..schedule.catalogue import KINDS
from .explain import Explanation, explain_plan
from .explain_pipeline_text import explain_pipeline_text
from .pipeline.evaluate import PipelineCost, evaluate_pipeline
from .pipeline.plan import plan_pipeline, with_schedules
from .pipeline.segments import Chain
from .spmd.plan_options import PlanOptions
from .spmd.planned import Planned

MOST_BORDERS = 6  # of which the moves are priced: those next to the slowest stages

Report = Callable[[str], None]


@dataclass(frozen=True)
class Priced:
    """A pipeline and what it is here: `text`. Seconds are of a step, those but the step's of the mean rank. `note` says
    why there are none."""

    text: str
    step_seconds: float = 0.0
    works_seconds: float = 0.0
    reduces_seconds: float = 0.0
    waits_seconds: float = 0.0
    peak_bytes: float = 0.0
    fits: bool = True
    chosen: bool = False
    note: str = ""


@dataclass(frozen=True)
class RankCost:
    """The seconds of a step on one rank along the pipeline's axis, and the most bytes that it holds."""

    stages: tuple[int, ...]
    forward_seconds: float
    backward_seconds: float
    reduces_seconds: float
    waits_seconds: float
    peak_bytes: float


@dataclass(frozen=True)
class PipelineExplanation:
    """`print` it. `inside`: why what a pattern matches is sharded as it is, where one was given."""

    plan: Plan
    ranks: tuple[RankCost, ...]
    micro_batches: tuple[Priced, ...]
    schedules: tuple[Priced, ...]
    cuts: tuple[Priced, ...]
    borders_left_out: int
    inside: Explanation | None

    def __str__(self) -> str:
        return explain_pipeline_text(self)


def explain_pipeline(
    planned: Planned, pattern: str | None = None, alternatives: int = 6, report: Report = lambda text: None
) -> PipelineExplanation:
    """Explain the pipeline, and with a glob `pattern` also what it matches inside of the stages (planner/explain.py).
    Raise StrategyError if it matches nothing."""
    inside = explain_plan(planned.inner, pattern, alternatives, report=report) if pattern else None
    pricing = _Pricing(planned, report)
    cuts, left_out = pricing.cuts()
    return PipelineExplanation(
        planned.plan,
        tuple(ranks_of(planned.stages.evaluated)),
        tuple(pricing.micro_batches()),
        tuple(pricing.schedules()),
        tuple(cuts),
        left_out,
        inside,
    )


def ranks_of(evaluated: PipelineCost) -> Iterator[RankCost]:
    """Iterate over what each rank along the pipeline's axis does in a step."""
    played, step = evaluated.played, evaluated.step_seconds
    for rank, order in enumerate(played.schedule.orders):
        seconds = {False: 0.0, True: 0.0}
        for action, start, end in zip(order, played.starts[rank], played.ends[rank]):
            seconds[action.kind == "F"] += end - start
        once = evaluated.once_seconds[rank]
        yield RankCost(
            evaluated.pipeline.stages_of(rank),
            seconds[True],
            seconds[False],
            once,
            step - sum(seconds.values()) - once,
            sum(evaluated.memory[rank].values()),
        )


class _Pricing:
    """Prices what `explain_pipeline` compares with."""

    def __init__(self, planned: Planned, report: Report):
        self.planned, self.staged, self.report = planned, planned.stages, report
        self.limit, self.chosen = planned.plan.memory_limit_bytes, planned.stages.evaluated.pipeline
        self.options: PlanOptions = replace(
            planned.options, within=None, micro_batches=1, memory_bytes=self.limit, refuses=False
        )

    def priced(self, text: str, evaluated: PipelineCost) -> Priced:
        """Return the price of a evaluated pipeline, which `text` describes."""
        ranks, step = evaluated.pipeline.ranks, evaluated.step_seconds
        works, reduces = sum(evaluated.played.busy) / ranks, sum(evaluated.once_seconds) / ranks
        return Priced(
            text, step, works, reduces, step - works - reduces, evaluated.peak_bytes, evaluated.peak_bytes <= self.limit
        )

    def itself(self, text: str) -> Priced:
        """Return the price of the chosen pipeline, marked as chosen."""
        return replace(self.priced(text, self.staged.evaluated), chosen=True)

    def micro_batches(self) -> list[Priced]:
        """Price the numbers of micro-batches that were tried with the chosen schedule, and half and twice the chosen
        one, in order of their number."""
        p, samples = self.chosen, self.planned.plan.samples
        best: dict[int, PipelineCost] = {}
        for evaluated in sorted(self.staged.candidates, key=lambda j: (j.peak_bytes > self.limit, j.step_seconds)):
            if (evaluated.pipeline.schedule, evaluated.pipeline.stages_per_rank) == (p.schedule, p.stages_per_rank):
                best.setdefault(evaluated.pipeline.micro_batches, evaluated)
        best.pop(p.micro_batches, None)
        found = {m: self.priced(_batches(m, samples), evaluated) for m, evaluated in best.items()}
        found[p.micro_batches] = self.itself(_batches(p.micro_batches, samples))
        for m in {p.micro_batches // 2, 2 * p.micro_batches} - found.keys() - {0}:
            if samples % m == 0:
                found[m] = self._planned_anew(m)
        return [found[m] for m in sorted(found)]

    def _planned_anew(self, m: int) -> Priced:
        text = _batches(m, self.planned.plan.samples)
        self.report(text)
        try:
            other = plan_pipeline(
                self.planned.captured,
                self.planned.plan.mesh,
                self.options,
                self.planned.plan.model,
                schedule=self.chosen.schedule,
                micro_batches=m,
                stages_per_rank=self.chosen.stages_per_rank,
                report=self.report,
            )
        except AutoparError as error:
            return Priced(text, note=error.message)
        return self.priced(text, other.stages.evaluated)

    def schedules(self) -> list[Priced]:
        """Price every schedule with its best cut, those that fit first, the fastest first, and those that are
        impossible last."""
        p, found, impossible = self.chosen, [self.itself(_schedule(self.chosen))], []
        for name, kind in KINDS.items():
            v = kind.chunks or max(2, p.stages_per_rank)
            if (name, v) == (p.schedule, p.stages_per_rank):
                continue
            self.report(name)
            try:
                found += [self.priced(_schedule(j.pipeline), j) for j in with_schedules(self.staged, [(name, v)])]
            except AutoparError as error:
                impossible.append(Priced(name, note=error.message))
        return sorted(found, key=lambda one: (not one.fits, one.step_seconds)) + impossible

    def cuts(self) -> tuple[list[Priced], int]:
        """Price the chosen cut, an even one, and each border moved; and return how many borders are left out."""
        p, best = self.chosen, self.staged.best
        _, segments, _ = best.search.prepared(best.base)
        found, starts = [self.itself("as chosen")], [*segments.starts]
        even = _even(segments, len(p.cuts) + 1)
        found.append(self.priced("equally many segments a stage", self._cut(even)))
        slow = [c.forward_seconds + c.input_seconds + c.weight_seconds for c in p.costs]
        borders = sorted(range(len(p.cuts)), key=lambda i: (-max(slow[i], slow[i + 1]), i))
        for i in sorted(borders[:MOST_BORDERS]):
            at = starts.index(p.cuts[i])
            for step, how in ((-1, "earlier"), (1, "later")):
                if 0 <= at + step < len(starts) and starts[at + step] not in p.cuts:
                    moved = (*p.cuts[:i], starts[at + step], *p.cuts[i + 1 :])
                    where = segments.parts[at + step + 1].name.partition(" to ")[0]
                    found.append(self.priced(f"stage {i + 1} {how}, in {where}", self._cut(moved)))
        return found, max(0, len(borders) - MOST_BORDERS)

    def _send(self, bytes_: float) -> float:
        return CollectiveCost(self.options.hardware, self.planned.plan.mesh).seconds(
            "send", (self.chosen.axis,), bytes_
        )

    def _cut(self, cuts: Sequence[str]) -> PipelineCost:
        p, (problem, e), inner = self.chosen, self.planned.whole, self.planned
        pipeline = replace(p, cuts=tuple(cuts), costs=(), owners=())
        tail = self.staged.best.search.plans.tail_cost
        return evaluate_pipeline(problem, e, inner.pricer, pipeline, self._send, inner.live_bytes, tail=tail)


def _even(segments: Chain, stages: int) -> tuple[str, ...]:
    count = len(segments.segments)
    return segments.cuts([count * i // stages for i in range(1, stages)])


def _schedule(p: Pipeline) -> str:
    return f"{p.schedule}, {p.stages_per_rank} stages a rank" if p.stages_per_rank > 1 else p.schedule


def _batches(m: int, samples: int) -> str:
    return f"{m} of {samples // m} sample{'s' if samples // m > 1 else ''}"
