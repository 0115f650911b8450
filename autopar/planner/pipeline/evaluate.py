"""Price a pipeline: the stages of one cut played in the order of a schedule, and the memory of every rank.

The solver of the cut (autopar/planner/pipeline/cut.py) knows formulas of schedules; here the schedule itself is played
with the seconds of its stages (autopar/schedule/play.py), those of the busiest streams times what a micro-batch takes
longer as it is played (autopar/planner/objective/player.py). Gradients are reduced beside the last backward of a stage,
parameters that are gathered once beside its first forward; what does not hide there is charged after the last action,
as are the seconds of the step's tail, if there is one, for which the backwards of all ranks wait:

    step = max over ranks (end of the last action + what of reductions and such gathers of its stages does not hide)

    bytes of a rank = parameters, copies of them that stay, gradients, optimizer state of its stages
                      + what its micro-batches in flight save + the most that comes and goes in one of its stages
                      + outputs of all micro-batches, if they are kept + messages + reserve
                      or, after all micro-batches, what reduces gradients
                      + keys of whole rows, where chunks of them follow one another (kept_keys.py)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...plans.pipeline import Pipeline, StageCost
from ...schedule.catalogue import KINDS
from ...schedule.play import play
from ...schedule.played import Played
from ..objective.chosen_tensors import PARAMETERS
from ..objective.evaluate import Evaluation
from ..objective.memory_timeline import (
    BUCKETS,
    GRADIENTS,
    KEPT,
    RESERVE,
    RETAINED,
    SAVED,
    TRANSIENT,
    LiveBytes,
    live_bytes,
)
from ..objective.player import stretch_of
from ..objective.pricer import Pricer
from ..objective.tail_cost import NO_TAIL, TailCost
from ..problem.problem import Problem
from .kept_keys import kept_bytes
from .model import GPIPE, ONE_F_ONE_B, ZB_H1, ZB_H2, Timing, interleaved
from .part import Part
from .stage_costs import Parts

Send = Callable[[float], float]


@dataclass(frozen=True)
class PipelineCost:
    """A pipeline with its costs. By rank: `once_seconds`, before its first action and after its last, and of the tail
    for which it waits; of these `tied_seconds`, to add up gradients of parameters that other ranks have too; `memory`,
    bytes at its peak by kind. `parts`: by stage. `unmade_bytes`: of the rank with most of them, what outputs of all
    micro-batches would take that are made when they are read."""

    pipeline: Pipeline
    played: Played
    once_seconds: tuple[float, ...]
    tied_seconds: tuple[float, ...]
    memory: tuple[dict[str, float], ...]
    parts: tuple[Part, ...]
    unmade_bytes: float = 0.0

    @property
    def step_seconds(self) -> float:
        """Return the seconds from the first action of any rank to the end of the slowest rank."""
        ends = [times[-1] if times else 0.0 for times in self.played.ends]
        return max(end + once for end, once in zip(ends, self.once_seconds)) - self.played.first

    @property
    def waiting_share(self) -> float:
        """Return the share of the step in which the mean rank neither computes nor reduces."""
        busy = sum(self.played.busy) + sum(self.once_seconds)
        return 1 - busy / (self.pipeline.ranks * self.step_seconds) if self.step_seconds else 0.0

    @property
    def fullest(self) -> int:
        """Return the rank that holds most."""
        return max(range(self.pipeline.ranks), key=lambda rank: sum(self.memory[rank].values()))

    @property
    def peak_bytes(self) -> float:
        """Return the bytes of the fullest rank at its peak."""
        return sum(self.memory[self.fullest].values())

    @property
    def communication_seconds(self) -> float:
        """Return the seconds of a step that communication takes on the mean rank, without what the pipeline sends."""
        moved = sum(w.moved for part in self.parts for w in part.work.values())
        once = sum(self.tied_seconds) + sum(part.once_moved for part in self.parts)
        return (moved * sum(self.pipeline.shares) + once) / self.pipeline.ranks

    @property
    def parameter_seconds(self) -> float:
        """Return the seconds of a step that the mean rank spends on the optimizer and on parameters on the host."""
        return sum(part.parameter_seconds for part in self.parts) / self.pipeline.ranks


def parts_of(
    problem: Problem,
    e: Evaluation,
    pricer: Pricer,
    pipeline: Pipeline,
    live: LiveBytes | None,
    stretch: float | None = None,
    like: Parts | None = None,
) -> Parts:
    """Return the costs of the stages of a pipeline; `stretch`: how many times as long as its busiest streams need a
    pass takes, if that is known; `like`: its stages under the same plan with other ops computed again or beside
    exchanges, if they are known; other arguments as of `evaluate_pipeline`."""
    live = live or live_bytes(problem, e, pricer)
    if stretch is None:
        stretch = stretch_of(problem, e, pricer, live.order)
    if like is not None:
        return like.under(e, live, stretch)
    return Parts(problem, e, pricer, pipeline.cuts, True, live, stretch)


def evaluate_pipeline(
    problem: Problem,
    e: Evaluation,
    pricer: Pricer,
    pipeline: Pipeline,
    send: Send,
    live: LiveBytes | None = None,
    keeps_outputs: bool = True,
    tail: TailCost = NO_TAIL,
    found: Parts | None = None,
) -> PipelineCost:
    """Evaluate what a pipeline without costs costs under a plan of one of its micro-batches. `send`: seconds of a
    tensor of so many bytes of a device from one stage to the next; `live`: the memory of the whole plan, if it is
    known; `keeps_outputs`: of all micro-batches; `tail`: of the step, if it has one; `found`: its stages, if they are
    known. Raise StageError as StagePlacement does."""
    found = found or parts_of(problem, e, pricer, pipeline, live)
    parts, orders = found.found, pipeline.orders
    rank_of = orders.rank_of_stage
    tied_seconds = [0.0] * pipeline.ranks
    memory: list[Any] = [_memory(parts, orders.stages_of(rank)) for rank in range(pipeline.ranks)]  # counted in floats
    for tied in found.tied:  # its gradients add up over the ranks that have it; one that has it twice holds it once
        ranks = Counter(rank_of[s] for s in tied.parts)
        for rank, times in ranks.items():
            tied_seconds[rank] += 2 * send(tied.gradient_bytes) if len(ranks) > 1 else 0.0
            memory[rank] -= Counter({kind: bytes_ * (times - 1) for kind, bytes_ in tied.kinds.items()})
    transfers = [max(sum(map(send, part.sent)), sum(map(send, part.returned))) for part in parts]
    played = play(
        orders,
        [p.forward_seconds for p in parts],
        [p.input_seconds for p in parts],
        [p.weight_seconds for p in parts],
        transfers[:-1],
        [p.saved_bytes for p in parts],
        pipeline.shares,
        pipeline.gained_by_stage,
    )
    unmade_bytes = 0.0
    for rank, held in enumerate(memory):
        held[SAVED] += played.peak(rank)
        kept, growing = kept_bytes(orders, rank, pipeline.row_chunks, parts)
        held[KEPT] += kept
        held[TRANSIENT] += growing
        mine, outputs = [parts[s] for s in orders.stages_of(rank)], 0.0
        if pipeline.micro_batches > 1:  # the output of one is counted where the op that makes it runs
            outputs = pipeline.micro_batches * sum(part.output_bytes for part in mine)
        more = besides(held, outputs if keeps_outputs else 0.0, [part.reducing_bytes for part in mine])
        held[TRANSIENT] += more + (tail.bytes_ if rank == rank_of[-1] else 0.0)
        unmade_bytes = max(unmade_bytes, 0.0 if keeps_outputs else outputs)
        held[RESERVE] += problem.reserve_bytes
    peaks = [sum(held.values()) for held in memory]
    costs = tuple(
        StageCost(
            p.forward_seconds,
            p.input_seconds,
            p.weight_seconds,
            t,
            sum(p.sent) + sum(p.returned),
            p.state_bytes,
            p.saved_bytes,
            peaks[rank_of[s]],
            p.parameters,
            p.name,
        )
        for s, (p, t) in enumerate(zip(parts, transfers))
    )
    kinds = tuple({kind: bytes_ for kind, bytes_ in held.items() if bytes_ > 0.5} for held in memory)
    once = tuple(
        tail.seconds + t + sum(parts[s].once_seconds for s in orders.stages_of(rank))
        for rank, t in enumerate(tied_seconds)
    )
    return PipelineCost(
        replace(pipeline, costs=costs), played, once, tuple(tied_seconds), kinds, tuple(parts), unmade_bytes
    )


def _memory(parts: Sequence[Part], stages: Sequence[int]) -> Counter:
    """Return what a rank holds besides activations, in bytes by kind."""
    held: Counter = Counter()
    for s in stages:
        held.update(parts[s].resident)
        held[PARAMETERS] += parts[s].computing_bytes
        held[RETAINED] += parts[s].retained_bytes
        held[GRADIENTS] += parts[s].gradient_bytes + parts[s].whole_bytes
        held[BUCKETS] += sum(parts[s].sent) + sum(parts[s].returned)
        held[BUCKETS] += sum(parts[s - 1].sent) + sum(parts[s - 1].returned) if s else 0.0
    held[TRANSIENT] += max(parts[s].transient_bytes for s in stages)
    return held


def besides(held: Counter, output_bytes: float, reducing_bytes: Sequence[float]) -> float:
    """Return the bytes that a rank holds besides what one of its micro-batches at work does: the outputs of all; and,
    when nothing else comes and goes any more, gradients in the buffers that reduce them, if those are more."""
    working = held[SAVED] + held[TRANSIENT] + held[BUCKETS]
    return output_bytes + max(0.0, max(reducing_bytes) - working)


def timing_of(schedule: str, ranks: int, stages_per_rank: int, left: float = 1 / 3, row_chunks: int = 1) -> Timing:
    """Return the same as `_timing_of_rows` does, for rows in so many chunks, of which a rank holds so many more."""
    timing = _timing_of_rows(schedule, ranks, stages_per_rank, left)
    if row_chunks == 1:
        return timing
    held = timing.in_flight
    return replace(timing, in_flight=lambda p, s, m: min(m, held(p, s, m) + row_chunks - 1))


def _timing_of_rows(schedule: str, ranks: int, stages_per_rank: int, left: float) -> Timing:
    """Return what the stage solver takes a schedule for. Those whose ranks have their stages as a V are cut as if each
    stage were alone, with as much in flight as two of them share. `left`: the share of a bubble that weight gradients
    cannot fill."""
    v, kind = stages_per_rank, KINDS[schedule]
    if kind.v_shaped:

        def shared(stages: int, stage: int, micro_batches: int) -> float:
            most = kind.in_flight(ranks, v, micro_batches) if kind.in_flight else 2 * ranks + 1
            return max(1.0, min(micro_batches, most / v))

        return Timing(schedule, left, shared)
    if v > 1:
        timing = interleaved(v)
        return replace(timing, name=schedule, bubble_factor=timing.bubble_factor * (left if kind.in_flight else 1))
    by_name = {
        "gpipe": GPIPE, "naive": replace(GPIPE, in_flight=lambda p, s, m: 1),
        "zb_h1": replace(ZB_H1, bubble_factor=left), "zb_h2": ZB_H2,
    }  # fmt: skip
    if kind.in_flight is not None and schedule not in by_name:
        return Timing(schedule, left, lambda stages, stage, m: min(m, kind.in_flight(ranks, v, m)))
    return replace(by_name.get(schedule, ONE_F_ONE_B), name=schedule)
