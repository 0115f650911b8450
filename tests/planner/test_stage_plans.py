"""Stages that take their decisions from plans of their own: the cut that chooses them is the best of all."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autopar.errors import MemoryInfeasibleError
from autopar.planner.pipeline.cut import cut_stages
from autopar.planner.pipeline.cut_interleaved import cut_looped
from autopar.planner.pipeline.model import GPIPE, ONE_F_ONE_B, ZB_H1, interleaved
from autopar.planner.pipeline.pareto import Levels, Variants
from tests.planner.pipelines import chain


def several(rng: np.random.Generator, length: int, plans: int):
    """The same segments under several plans, and what passes between two of them."""
    found = [chain(rng, length) for _ in range(plans)]
    borders = rng.integers(0, 3, (plans, plans)) * (1 - np.eye(plans))
    borders[rng.random((plans, plans)) < 0.2] = np.inf
    np.fill_diagonal(borders, 0.0)
    able = [all(own[i].may_cut_after for own in found) for i in range(length)]
    segments = [[one.__class__(**{**vars(one), "may_cut_after": ok}) for one, ok in zip(own, able)] for own in found]
    return segments, Variants([(own, (), Levels(own)) for own in segments[1:]], borders)


def brute_force(segments, borders, stages: int, micro_batches: int, limit: float, timing) -> float:
    """The shortest step over all cuts and all plans of all stages, each stage alone by the cut into one."""
    count, best, known = len(segments[0]), np.inf, {}
    able = [i + 1 for i in range(count - 1) if segments[0][i].may_cut_after]

    def seconds(k: int, s: int, first: int, end: int) -> float:
        if (k, s, first, end) not in known:
            flight = timing.in_flight(stages, s, micro_batches)
            own, sends, room = segments[k][first:end], 0.0, limit
            for at, way in ((first - 1, 1), (end - 1, 0)):
                if 0 <= at < count - 1:
                    sends += segments[k][at].boundary_seconds[way]
                    room -= segments[k][at].boundary_bytes
            room -= sum(one.state_bytes for one in own) + max(one.transient_bytes for one in own)
            levels = itertools.product(*(one.levels for one in own))
            fit = [
                sum(l.seconds for l in each)
                for each in levels
                if flight * sum(l.activation_bytes for l in each) <= room
            ]
            known[k, s, first, end] = min(fit, default=np.inf) + sends
        return known[k, s, first, end]

    for cuts in itertools.combinations(able, stages - 1):
        ends = [0, *cuts, count]
        for plans in itertools.product(range(len(segments)), repeat=stages):
            times = [seconds(k, s, ends[s], ends[s + 1]) for s, k in enumerate(plans)]
            times = [t + (borders[plans[s - 1], plans[s]] if s else 0.0) for s, t in enumerate(times)]
            best = min(best, timing.step_seconds(times, micro_batches) if np.isfinite(times).all() else np.inf)
    return best


@pytest.mark.parametrize("seed", range(40))
def test_the_cut_is_the_best_of_all_plans_and_cuts(seed):
    rng = np.random.default_rng(seed)
    stages, timing = int(rng.integers(2, 4)), (GPIPE, ONE_F_ONE_B, ZB_H1)[seed % 3]
    segments, variants = several(rng, int(rng.integers(stages, 7)), int(rng.integers(2, 4)))
    if 1 + sum(one.may_cut_after for one in segments[0][:-1]) < stages:
        return
    limit = float(rng.integers(150, 700))
    wanted = brute_force(segments, variants.borders, stages, 6, limit, timing)
    try:
        found = cut_stages(segments[0], stages, 6, limit, timing, others=variants)
    except MemoryInfeasibleError:
        assert wanted == np.inf
        return
    assert found.step_seconds == pytest.approx(wanted)
    assert all(stage.total_bytes <= limit for stage in found.stages)


@pytest.mark.parametrize("seed", range(10))
def test_looped_stages_are_no_slower_under_several_plans(seed):
    rng = np.random.default_rng(seed)
    segments, variants = several(rng, 10, 3)
    segments = [[one.__class__(**{**vars(one), "may_cut_after": True}) for one in own] for own in segments]
    variants = Variants([(own, (), Levels(own)) for own in segments[1:]], variants.borders)
    try:
        alone = cut_looped(segments[0], 2, 6, 500.0, interleaved(2))
    except MemoryInfeasibleError:
        return
    together = cut_looped(segments[0], 2, 6, 500.0, interleaved(2), others=variants)
    assert together.step_seconds <= alone.step_seconds * 1.1  # both are searched, from other starts
    assert all(stage.total_bytes <= 500 for stage in together.stages)
