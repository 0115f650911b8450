"""Estimate a pipeline by the segments of its plan of a micro-batch: its best cut, whose schedule is played with the
seconds of the cut's segments. The whole graph is not needed for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...errors import MemoryInfeasibleError
from ...schedule.catalogue import KINDS
from ...utils.format import size
from ..spmd.planned import Planned
from .best_cut import OtherPlans, best_cut, played
from .evaluate import timing_of
from .model import StageCut
from .segments import Chain

if TYPE_CHECKING:
    from .search import PipelineSearch

MOST_GAIN = 0.1  # of a step, that moving boundaries may save
PLENTY = 0.5  # of the room: where no rank takes more, the limit decides nothing


@dataclass(frozen=True)
class Estimate:
    """A cut of a plan of a micro-batch for a schedule, by formulas. `peak_bytes`: of the fullest rank; `least_seconds`:
    what a step would take at least if the memory had no limit; `others`: plans of which stages may take one instead."""

    search: PipelineSearch
    inner: Planned
    schedule: str
    stages_per_rank: int
    step_seconds: float
    peak_bytes: float
    fits: bool
    least_seconds: float = 0.0
    others: tuple[Planned, ...] = ()

    @property
    def key(self) -> tuple[PipelineSearch, Planned, str, int]:
        """Return what it is of: a search, a plan of a micro-batch and a schedule."""
        return self.search, self.inner, self.schedule, self.stages_per_rank


def estimate(
    search: PipelineSearch, inner: Planned, segments: Chain, kind: str, v: int, fastest: float = math.inf
) -> Estimate:
    """Estimate the best cut of the segments of a plan for one schedule. `fastest`: seconds of another pipeline;
    boundaries are not moved where that would hardly undercut it."""
    reserve, least = inner.problem.reserve_bytes, even_seconds(search, segments, kind, v)
    room = search.limit - reserve
    try:
        _check_state(search, segments, room)
        found = best_cut(search, segments, kind, v, room, is_rough=True, moves=False)
    except MemoryInfeasibleError as error:
        missing = error.missing_bytes * _times(kind, v)
        return Estimate(search, inner, kind, v, least, search.limit + missing, False, least)
    player = played(search, kind, v, [segments])
    seconds = float(player.step_seconds([found.stages])[0])
    moves = seconds * (1 - MOST_GAIN) < fastest
    if moves:
        found = best_cut(search, segments, kind, v, room, is_rough=True)
        seconds = float(player.step_seconds([found.stages])[0])
    bytes_ = _fullest(found, kind, v)
    if bytes_ <= room * PLENTY:
        least = seconds
    elif not any(any(counts[1:]) for stage in found.stages for counts in stage.levels.values()):
        free = best_cut(search, segments, kind, v, math.inf, is_rough=True, moves=moves)
        least = min(seconds, float(player.step_seconds([free.stages])[0]))
    return Estimate(search, inner, kind, v, seconds, reserve + bytes_, True, least)


def estimate_by_stage(
    search: PipelineSearch, plans: Sequence[Planned], chains: Sequence[Chain], borders: np.ndarray, kind: str, v: int
) -> Estimate | None:
    """Estimate the best cut for one schedule where each stage may take another one of some plans, with their segments
    and borders (see OtherPlans); None if none fits or all stages take one."""
    inner, others = plans[0], tuple(plans[1:])
    reserve = inner.problem.reserve_bytes
    try:
        room, choices = search.limit - reserve, OtherPlans(chains[1:], borders)
        found = best_cut(search, chains[0], kind, v, room, is_rough=True, others=choices)
    except MemoryInfeasibleError:
        return None
    if len({stage.plan for stage in found.stages}) == 1:
        return None
    seconds = float(played(search, kind, v, chains).step_seconds([found.stages])[0])
    return Estimate(search, inner, kind, v, seconds, reserve + _fullest(found, kind, v), True, 0.0, others)


def even_seconds(search: PipelineSearch, segments: Chain, kind: str, v: int) -> float:
    """Return the seconds of a step whose ranks all take as long and compute nothing again."""
    ranks = search.ranks
    even = [sum(segment.levels[0].seconds for segment in segments.segments) / ranks] * ranks
    step = timing_of(kind, ranks, v).step_seconds(even, search.micro_batches)
    return step + segments.once_seconds / ranks


def _times(kind: str, v: int) -> int:
    """Return how many of the stages that a cut takes for ranks share one."""
    return v if KINDS[kind].v_shaped else 1


def _fullest(cut: StageCut, kind: str, v: int) -> float:
    return max(stage.total_bytes for stage in cut.stages) * _times(kind, v)


def _check_state(search: PipelineSearch, segments: Chain, room: float) -> None:
    """Raise MemoryInfeasibleError if parameters and optimizer state, spread evenly over the ranks, leave no room for
    activations, so that no cut has to be looked for."""
    state = sum(segment.state_bytes for segment in segments.segments) - sum(one.bytes_ for one in segments.shared)
    if state / search.ranks > room:
        missing = state / search.ranks - room
        raise MemoryInfeasibleError(
            f"parameters and optimizer state need {size(missing)} more a device",
            missing_bytes=math.ceil(missing),
            fix="use more devices",
        )
