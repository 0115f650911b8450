"""Boundaries of stages that are moved: the played step gets no longer, what fits still fits."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest

from autopar.errors import MemoryInfeasibleError
from autopar.planner.pipeline.cut_interleaved import Loops, cut_looped
from autopar.planner.pipeline.evaluate import timing_of
from autopar.planner.pipeline.played_cuts import PlayedCuts
from autopar.planner.pipeline.segments import Chain
from autopar.schedule.catalogue import KINDS, make
from autopar.schedule.play import play
from autopar.schedule.timetable import Timetable
from tests.planner.pipelines import chain

SCHEDULES = [("1f1b", 1), ("zb_h1", 1), ("interleaved_1f1b", 2), ("zbv", 2)]
MICRO_BATCHES = 6


def chain_of(rng: np.random.Generator, length: int, most_levels: int = 1) -> Chain:
    """Segments whose parts take what they take when nothing is computed again, with something once a step."""
    segments = [one.__class__(**{**vars(one), "may_cut_after": True}) for one in chain(rng, length, most_levels)]
    parts = []
    for one in segments:
        forward, backward = one.levels[0].forward_seconds, one.levels[0].backward_seconds
        weight = backward * float(rng.random())
        parts.append(
            SimpleNamespace(
                forward_seconds=forward,
                input_seconds=backward - weight,
                weight_seconds=weight,
                once_seconds=float(rng.random()) * 5,
            )
        )
    return Chain(tuple(segments), (), (), tuple(parts))


def searched(schedule: str, v: int, found: Chain, ranks: int, limit: float):
    """The best cut by formulas, what says which cuts fit, what plays them, and the schedule."""
    timing, count = timing_of(schedule, ranks, v), ranks
    if KINDS[schedule].v_shaped:
        count, limit = ranks * v, limit / v
    cut = cut_looped(found.segments, count, MICRO_BATCHES, limit, timing, is_rough=True)
    loops = Loops(found.segments, count, MICRO_BATCHES, limit, timing, ())
    orders = make(schedule, ranks, MICRO_BATCHES, v)
    return cut, loops, PlayedCuts([found], Timetable(orders)), orders


@pytest.mark.parametrize("schedule, v", SCHEDULES)
@pytest.mark.parametrize("seed", range(3))
def test_a_cut_is_played_with_the_seconds_of_its_segments(schedule, v, seed):
    rng = np.random.default_rng(seed)
    found = chain_of(rng, 9)
    cut, _, player, orders = searched(schedule, v, found, 2, math.inf)
    ends = [*cut.cuts, len(found.segments)]
    spans = [found.parts[first:end] for first, end in zip(ends, ends[1:])]
    names = [f"{what}_seconds" for what in ("forward", "input", "weight")]
    work = [[sum(getattr(part, name) for part in span) for span in spans] for name in names]
    sends = [max(found.segments[first - 1].boundary_seconds) for first in cut.cuts[1:]]
    played = play(orders, *work, sends)
    once = [sum(p.once_seconds for s in orders.stages_of(r) for p in spans[s]) for r in range(2)]
    wanted = max(own[-1] + more for own, more in zip(played.ends, once))
    assert player.step_seconds([cut.stages, cut.stages]) == pytest.approx([wanted] * 2)


@pytest.mark.parametrize("schedule, v", SCHEDULES)
def test_moves_shorten_the_played_step_within_memory(schedule, v):
    shorter = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        found, limit = chain_of(rng, 8, 3), float(rng.integers(300, 1200))
        try:
            cut, loops, player, _ = searched(schedule, v, found, 2, limit)
        except MemoryInfeasibleError:
            continue
        better = player.improved(cut, loops)
        before, after = player.step_seconds([cut.stages, better.stages])
        assert after <= before, seed
        shorter += after < before
        room = limit / v if KINDS[schedule].v_shaped else limit
        assert all(stage.total_bytes <= room for stage in better.stages), seed
        spans = sorted(span for stage in better.stages for span in stage.spans)
        assert [i for first, end in spans for i in range(first, end)] == list(range(8)), seed
        every = [
            [loops.span[pair] for pair in zip((0, *ends), (*ends, 8))]
            for ends in itertools.combinations(range(1, 8), len(spans) - 1)
        ]
        fit = [loops.stages(path) for path in every if not loops.excess(path, [0] * loops.ranks)]
        assert after >= player.step_seconds(fit).min() * (1 - 1e-9), seed
    assert shorter
