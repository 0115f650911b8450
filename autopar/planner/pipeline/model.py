"""Describe what the cut of a model into pipeline stages is made of: segments, the levels they may be run at, schedules,
and the result.

The seconds of a step, m micro-batches through stages that take t[s] = forward + backward each, T = max t, S = sum t:

    step = m T + bubble_factor (S - T)

The slowest stage works m times, and the first micro-batch has to come to it and the last one to leave it: S - T. Stages
of equal seconds t make it (m + p - 1) t, the step of GPipe (Huang et al., arXiv:1811.06965) and of 1F1B with a flush
(Narayanan et al., arXiv:2006.09503). For stages that differ, with `forward`, `backward` of one stage each:

* GPipe takes S + (m - 1) (max forward + max backward): step is a lower bound, and exact where one stage is slowest both
ways.
* 1F1B takes at most step, and exactly step where the last stage is the slowest. Else the stages after the slowest one,
s, may
  have finished while s works, so that it takes at least m t[s] + sum t[:s]: less than step by sum t[s+1:] at most.

v looped stages a rank (stage i on rank i mod p) divide the bubble by v (Narayanan et al., arXiv:2104.04473); t[s] is
then of a rank, and step is exact if all stages are equal, else a bound on neither side. A zero-bubble schedule fills
the bubble with weight gradients: ZB-H1 leaves (F + B - W) / (F + B + W) of it, a third of it for equal parts, ZB-H2
none (Qi et al., arXiv:2401.10241).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RecomputeOption:
    """A way to run a segment. Seconds are of one micro-batch, the backward's with what it computes again;
    `activation_bytes` are held for each micro-batch between its forward and its backward."""

    forward_seconds: float
    backward_seconds: float
    activation_bytes: int

    @property
    def seconds(self) -> float:
        """Return the seconds of forward and backward, what runs again included."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True)
class Segment:
    """The least that is not cut. Pieces of one `kind` have the same levels.

    `state_bytes`: parameters, gradients, optimizer state. `transient_bytes`: what comes on top while it runs. A cut
    after it makes both neighbours hold `boundary_bytes` (a micro-batch's message); the sender pays: `boundary_seconds`
    are (forward, of the stage before the cut; backward, of the stage after it), zero where they are hidden.
    """

    kind: str
    levels: tuple[RecomputeOption, ...]
    state_bytes: int = 0
    transient_bytes: int = 0
    boundary_bytes: int = 0
    boundary_seconds: tuple[float, float] = (0.0, 0.0)
    may_cut_after: bool = True


@dataclass(frozen=True)
class Shared:
    """A parameter of two segments, counted in the `state_bytes` of both. Where one rank has both, `bytes_` are held
    once; where two have them, a step takes `seconds` more to add up its gradients."""

    first: int
    second: int
    bytes_: int
    seconds: float


@dataclass(frozen=True)
class Timing:
    """The time and memory of a schedule. `bubble_factor`: above. `in_flight`: micro-batches whose activations a
    rank holds at most, of (ranks, rank, micro-batches). `looped`: stages of a rank."""

    name: str
    bubble_factor: float
    in_flight: Callable[[int, int, int], float]
    looped: int = 1

    def step_seconds(self, times: Sequence[float], micro_batches: int) -> float:
        """Return the seconds of a step of stages that take `times` for a micro-batch, forward and backward."""
        slowest = max(times)
        return micro_batches * slowest + self.bubble_factor * (sum(times) - slowest)


def one_f_one_b(stages: int, stage: int, micro_batches: int) -> int:
    """Return the most micro-batches that a stage has in flight under 1F1B."""
    return min(micro_batches, stages - stage)


GPIPE = Timing("gpipe", 1.0, lambda stages, stage, micro_batches: micro_batches)
ONE_F_ONE_B = Timing("1f1b", 1.0, one_f_one_b)
ZB_H1 = Timing("zb-h1", 1 / 3, one_f_one_b)
ZB_H2 = Timing("zb-h2", 0.0, lambda stages, stage, micro_batches: min(micro_batches, 2 * (stages - stage) - 1))


def interleaved(looped: int) -> Timing:
    """Return the timing of Megatron's schedule. A rank holds up to (looped - 1) ranks + 2 (ranks - rank - 1) + 1
    outputs of its stages; they count as if they were of all of its stages alike, which is exact for stages with equal
    activations."""

    def in_flight(ranks: int, rank: int, micro_batches: int) -> float:
        return min(micro_batches, ((looped - 1) * ranks + 2 * (ranks - rank - 1) + 1) / looped)

    return Timing(f"interleaved-{looped}", 1 / looped, in_flight, looped)


@dataclass(frozen=True)
class RankSegments:
    """Describes what one rank runs: segments `first` to `end` (without it) of each of its `spans`, one if nothing is
    looped, and `levels[kind][l]` of them at level l. `bytes_`: of the device when memory peaks, by what they are.
    `plan`: the number of the plan of a micro-batch that decides, if there are several."""

    spans: tuple[tuple[int, int], ...]
    seconds: float
    in_flight: float
    bytes_: Mapping[str, float]
    levels: Mapping[str, tuple[int, ...]]
    plan: int = 0

    @property
    def total_bytes(self) -> float:
        """Return the bytes of all kinds that a device of the rank holds."""
        return sum(self.bytes_.values())


@dataclass(frozen=True)
class StageCut:
    """The fastest cut. `shared_seconds`: of the reductions of parameters on two stages, in `step_seconds`.
    `bound_seconds`: no cut takes less."""

    stages: tuple[RankSegments, ...]
    timing: Timing
    micro_batches: int
    step_seconds: float
    shared_seconds: float
    bound_seconds: float

    @property
    def cuts(self) -> tuple[int, ...]:
        """Return the segment where each stage begins."""
        return tuple(sorted(first for stage in self.stages for first, _ in stage.spans))

    @property
    def balance(self) -> float:
        """Return the seconds of the slowest stage over those of the mean one."""
        times = [stage.seconds for stage in self.stages]
        return max(times) * len(times) / sum(times)

    @property
    def bubble(self) -> float:
        """Return the share of a step in which the mean stage does nothing."""
        return 1 - self.micro_batches * sum(stage.seconds for stage in self.stages) / (
            len(self.stages) * self.step_seconds
        )
