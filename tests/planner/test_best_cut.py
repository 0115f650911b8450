"""The best cut of segments whose stages may take several plans: no slower, as it is played, than under one of them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from autopar.errors import MemoryInfeasibleError
from autopar.planner.pipeline.best_cut import OtherPlans, best_cut, played
from autopar.planner.pipeline.model import RecomputeOption, Segment
from autopar.planner.pipeline.segments import Chain
from autopar.schedule.catalogue import KINDS, make
from autopar.schedule.timetable import Timetable
from tests.planner.test_played_cuts import MICRO_BATCHES, SCHEDULES, chain_of


def search_of(schedule: str, v: int, ranks: int = 2) -> SimpleNamespace:
    """Return what a cut reads of the search of a pipeline."""
    timetable = Timetable(make(schedule, ranks, MICRO_BATCHES, v))
    return SimpleNamespace(ranks=ranks, micro_batches=MICRO_BATCHES, row_chunks=1, timetable=lambda kind, v: timetable)


def seconds(search: SimpleNamespace, schedule: str, v: int, chains: list[Chain], cut) -> float:
    return float(played(search, schedule, v, chains).step_seconds([cut.stages])[0])


@pytest.mark.parametrize("schedule, v", SCHEDULES)
def test_several_plans_are_no_slower_than_one(schedule, v):
    search, faster = search_of(schedule, v), 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        chains, room = [chain_of(rng, 9, 2) for _ in range(3)], float(rng.integers(300, 1200))
        borders = rng.integers(0, 3, (3, 3)) * (1 - np.eye(3))
        borders[rng.random((3, 3)) < 0.2] = np.inf
        np.fill_diagonal(borders, 0.0)
        alone = []
        for one in chains:
            try:
                alone.append(seconds(search, schedule, v, [one], best_cut(search, one, schedule, v, room)))
            except MemoryInfeasibleError:
                alone.append(np.inf)
        try:
            cut = best_cut(search, chains[0], schedule, v, room, others=OtherPlans(chains[1:], borders))
        except MemoryInfeasibleError:
            assert min(alone) == np.inf, seed
            continue
        found, plans = seconds(search, schedule, v, chains, cut), [stage.plan for stage in cut.stages]
        assert np.isfinite([borders[pair] for pair in zip(plans, plans[1:])]).all(), seed
        assert found <= min(alone) * (1 + 1e-9), seed
        faster += found < min(alone) * (1 - 1e-3)
        most = room / v if KINDS[schedule].v_shaped else room
        assert all(stage.total_bytes <= most for stage in cut.stages), seed
    assert faster


def alike(work: float, once: float) -> Chain:
    """Return eight equal segments, their forward and both parts of their backward of equal seconds."""
    part = SimpleNamespace(forward_seconds=work, input_seconds=work, weight_seconds=work, once_seconds=once)
    segment = Segment("block", (RecomputeOption(work, 2 * work, 0),))
    return Chain((segment,) * 8, (), (), (part,) * 8)


def test_the_last_stage_takes_the_plan_whose_reductions_hide_while_it_waits():
    search, chains = search_of("1f1b", 1), [alike(10.0, once=0.0), alike(9.0, once=20.0)]
    cut = best_cut(search, chains[0], "1f1b", 1, 1e9, others=OtherPlans(chains[1:], np.zeros((2, 2))))
    assert [stage.plan for stage in cut.stages] == [0, 1]
    assert seconds(search, "1f1b", 1, chains, cut) < 836  # of the second plan for both; the first takes 840


@pytest.mark.parametrize("schedule, v", SCHEDULES)
def test_what_a_chain_remembers_is_what_is_found_anew(schedule, v):
    search = search_of(schedule, v)
    for seed in range(6):
        rng = np.random.default_rng(seed)
        old, rooms = chain_of(rng, 9, 2), rng.integers(300, 1200, 2).astype(float)
        ways = [(room, is_rough, moves) for room in rooms for is_rough in (True, False) for moves in (True, False)]
        for room, is_rough, moves in [*ways, *ways]:
            anew = Chain(old.segments, old.shared, old.starts, old.parts)
            try:
                expected = best_cut(search, anew, schedule, v, room, is_rough, moves)
            except MemoryInfeasibleError:
                with pytest.raises(MemoryInfeasibleError):
                    best_cut(search, old, schedule, v, room, is_rough, moves)
                continue
            found = best_cut(search, old, schedule, v, room, is_rough, moves)
            same = [(one.stages, one.step_seconds, one.bound_seconds, one.shared_seconds) for one in (found, expected)]
            assert same[0] == same[1], (seed, room, is_rough, moves)
            assert best_cut(search, old, schedule, v, room, is_rough, moves) is found
