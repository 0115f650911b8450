"""The best cut of a plan's segments for a schedule: what formulas choose, improved as the played step says.

Formulas (autopar/planner/pipeline/model.py) choose boundaries and, where stages may take several plans, the plan of
each. Beside that choice the best cut of every plan alone is a start, so that no choice is slower than one plan for all.
From each start boundaries are moved and stages take other plans as long as the played step gets shorter
(autopar/planner/pipeline/played_cuts.py): a plan that reduces or gathers more once a step costs little on a late stage,
which waits at the end of the step, and much on the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import MemoryInfeasibleError
from ...schedule.catalogue import KINDS
from .cut_interleaved import Loops, cut_looped
from .evaluate import timing_of
from .model import StageCut
from .pareto import Variants
from .played_cuts import PlayedCuts
from .segments import Chain

if TYPE_CHECKING:
    from .search import PipelineSearch


@dataclass(frozen=True, eq=False)
class OtherPlans:
    """Other plans of a micro-batch, of which a stage may take one, by their segments. `borders`: as of Variants."""

    chains: Sequence[Chain]
    borders: np.ndarray

    @property
    def variants(self) -> Variants:
        """Return them for a cut by formulas."""
        return Variants([(one.segments, one.shared, one.levels) for one in self.chains], self.borders)


def best_cut(
    search: PipelineSearch,
    segments: Chain,
    kind: str,
    v: int,
    room: float,
    is_rough: bool = False,
    moves: bool = True,
    others: OtherPlans | None = None,
) -> StageCut:
    """Cut the segments for a schedule of `v` stages a rank; `moves`: boundaries, as the played step says; `others`: the
    same segments under other plans, of which each stage may take one. Raise MemoryInfeasibleError if no cut fits in the
    `room`, in bytes of a rank."""
    if others is None:
        return _of_one_plan(search, segments, kind, v, room, is_rough, moves)
    found = cut_looped(**_problem(search, segments, kind, v, room, others), is_rough=is_rough)
    if not moves:
        return found
    starts = [found]
    for k, chain in enumerate([segments, *others.chains]):
        try:
            alone = _of_one_plan(search, chain, kind, v, room, is_rough)
        except MemoryInfeasibleError:
            continue
        starts.append(replace(alone, stages=tuple(replace(one, plan=k) for one in alone.stages)))
    return moved(search, segments, starts, kind, v, room, others)


def _of_one_plan(
    search: PipelineSearch, segments: Chain, kind: str, v: int, room: float, is_rough: bool, moves: bool = True
) -> StageCut:
    """Return the best cut under one plan, which its chain remembers: what is estimated is evaluated later."""
    known, key = segments.known_cuts, (search.ranks, search.micro_batches, kind, v, room, is_rough, moves)
    if key not in known:
        if moves:
            found = _of_one_plan(search, segments, kind, v, room, is_rough, moves=False)
            known[key] = moved(search, segments, [found], kind, v, room)
        else:
            known[key] = cut_looped(**_problem(search, segments, kind, v, room, None), is_rough=is_rough)
    return known[key]


def moved(
    search: PipelineSearch,
    segments: Chain,
    starts: Sequence[StageCut],
    kind: str,
    v: int,
    room: float,
    others: OtherPlans | None = None,
) -> StageCut:
    """Improve each of some cuts as long as that shortens the played step, in the same `room`, and return the best."""
    loops = Loops(**_problem(search, segments, kind, v, room, others))
    player = played(search, kind, v, [segments, *(others.chains if others else ())])
    improved = [player.improved(one, loops) for one in starts]
    return improved[int(player.step_seconds([one.stages for one in improved]).argmin())]


def played(search: PipelineSearch, kind: str, v: int, chains: Sequence[Chain]) -> PlayedCuts:
    """Return what plays cuts of some segments, given under one plan or several, with a schedule."""
    return PlayedCuts(chains, search.timetable(kind, v))


def _problem(
    search: PipelineSearch, segments: Chain, kind: str, v: int, room: float, others: OtherPlans | None
) -> dict[str, Any]:
    """Return what is to be cut, and into what, as arguments of `cut_looped` and of Loops."""
    timing, is_v_shaped = timing_of(kind, search.ranks, v, row_chunks=search.row_chunks), KINDS[kind].v_shaped
    ranks = search.ranks * v if is_v_shaped else search.ranks
    return {
        "segments": segments.segments,
        "ranks": ranks,
        "micro_batches": search.micro_batches,
        "limit_bytes": room / v if is_v_shaped else room,
        "timing": timing,
        "shared": segments.shared,
        "levels": segments.levels,
        "others": others.variants if others else None,
        "spans": segments.spans(ranks * timing.looped),
    }
