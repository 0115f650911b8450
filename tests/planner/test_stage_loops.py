"""Cuts for several stages a rank: never wrong in what they say, never below their bound, nearly always the best of all
cuts."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from autopar.errors import MemoryInfeasibleError, StrategyError
from autopar.planner.pipeline.cut import cut_stages
from autopar.planner.pipeline.cut_interleaved import cut_looped
from autopar.planner.pipeline.model import ONE_F_ONE_B, Shared, interleaved
from autopar.schedule.catalogue import make
from autopar.schedule.play import play
from tests.helpers.work import counted

from . import pipelines
from .test_stage_cut import BLOCK, EMBED, HEAD, all_cuts, sends


def fixed_bytes(segments, shared, spans):
    """All but activations, of a rank with these stages."""
    own = [i for first, end in spans for i in range(first, end)]
    state = sum(segments[i].state_bytes for i in own) - sum(
        s.bytes_ for s in shared if s.first in own and s.second in own
    )
    buffers = sum(segments[i - 1].boundary_bytes for span in spans for i in span if 0 < i < len(segments))
    return state + max(segments[i].transient_bytes for i in own) + buffers


def brute_force(segments, ranks, micro_batches, limit, timing, shared):
    """The best step over all cuts and all levels of all segments, inf if nothing fits."""

    def fewest_seconds(rank, *spans):
        room = limit - fixed_bytes(segments, shared, spans)
        flight = timing.in_flight(ranks, rank, micro_batches)
        runs = itertools.product(*(segments[i].levels for first, end in spans for i in range(first, end)))
        fits = (
            sum(l.seconds for l in run) for run in runs if flight * sum(l.activation_bytes for l in run) <= room + 1e-9
        )
        return min(fits, default=math.inf) + sum(sends(segments, *span) for span in spans)

    best, known = math.inf, {}
    for spans in all_cuts(segments, ranks * timing.looped):
        keys = [(rank, *spans[rank::ranks]) for rank in range(ranks)]
        times = [known[key] if key in known else known.setdefault(key, fewest_seconds(*key)) for key in keys]
        if max(times) < math.inf:
            rank_of = {i: s % ranks for s, (first, end) in enumerate(spans) for i in range(first, end)}
            apart = sum(o.seconds for o in shared if rank_of[o.first] != rank_of[o.second])
            best = min(best, timing.step_seconds(times, micro_batches) + apart)
    return best


def test_against_all_cuts():
    """Cuts that fit are found wherever there are any here; most are the best one, all are what they say."""
    gaps = []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        looped = int(rng.integers(2, 4))
        ranks = int(rng.integers(2, 4)) if looped == 2 else 2
        segments, timing = (
            pipelines.chain(rng, int(rng.integers(ranks * looped, 10)), most_levels=2),
            interleaved(looped),
        )
        if 1 + sum(segment.may_cut_after for segment in segments[:-1]) < ranks * looped:
            continue
        shared, micro_batches = pipelines.pairs(rng, segments), ranks * int(rng.integers(1, 5))
        with pytest.raises(MemoryInfeasibleError) as raised:
            cut_looped(segments, ranks, micro_batches, 0, timing, shared)
        problem = (
            segments,
            ranks,
            micro_batches,
            int(raised.value.missing_bytes * rng.uniform(0.95, 1.7)),
            timing,
            shared,
        )
        best = brute_force(*problem)
        try:
            cut = cut_looped(*problem)
        except MemoryInfeasibleError:
            assert best == math.inf, f"seed {seed}"
            continue
        assert cut.bound_seconds <= best * (1 + 1e-9) and best <= cut.step_seconds * (1 + 1e-9), f"seed {seed}: {cut}"
        for rank, stage in enumerate(cut.stages):
            levels = {segment.kind: segment.levels for segment in segments}
            runs = [(n, level) for kind, counts in stage.levels.items() for n, level in zip(counts, levels[kind])]
            held = timing.in_flight(ranks, rank, micro_batches) * sum(n * level.activation_bytes for n, level in runs)
            assert stage.total_bytes == pytest.approx(held + fixed_bytes(segments, shared, stage.spans)), f"seed {seed}"
            assert stage.total_bytes <= problem[3] + 1e-6, f"seed {seed}"
            seconds = sum(n * level.seconds for n, level in runs) + sum(sends(segments, *span) for span in stage.spans)
            assert stage.seconds == pytest.approx(seconds), f"seed {seed}"
        step = timing.step_seconds([stage.seconds for stage in cut.stages], micro_batches) + cut.shared_seconds
        assert cut.step_seconds == pytest.approx(step), f"seed {seed}"
        gaps.append(cut.step_seconds / best - 1)
    assert len(gaps) >= 120 and np.mean(np.array(gaps) < 1e-9) >= 0.85 and np.mean(gaps) < 0.01


@pytest.mark.parametrize("ranks, looped", [(2, 2), (2, 3), (3, 2), (4, 3), (6, 2)])
def test_equal_blocks_make_equal_stages(ranks, looped):
    cut = cut_looped([BLOCK] * 24, ranks, 12, 10**9, interleaved(looped))
    assert [sum(end - first for first, end in stage.spans) for stage in cut.stages] == [24 // ranks] * ranks
    assert len(cut.cuts) == ranks * looped and cut.balance == pytest.approx(1)
    assert cut.step_seconds == pytest.approx((12 + (ranks - 1) / looped) * 24 / ranks * 3.0)
    assert cut.bubble == pytest.approx((ranks - 1) / (looped * 12 + ranks - 1))
    assert cut.bound_seconds == pytest.approx(cut.step_seconds)


def test_a_long_model_is_close_to_its_bound():
    """A bound in fractions of a block: 126 / 16 blocks a rank are not whole, so that a gap of 8 / 7.875 would be no
    one's fault."""
    model = [EMBED, *[BLOCK] * 126, HEAD]
    cut, calls = counted(cut_looped, model, 16, 512, 10**9, interleaved(2), [Shared(0, 127, 400, 0.5)])
    assert calls < 300_000 and cut.step_seconds < 1.01 * cut.bound_seconds
    plain = cut_stages(model, 16, 512, 10**9, ONE_F_ONE_B, [Shared(0, 127, 400, 0.5)])
    assert cut.step_seconds < plain.step_seconds and cut.bubble < plain.bubble


def test_a_parameter_shared_by_two_stages_of_a_rank_is_there_once():
    tied = Shared(0, 2, 100, 5.0)  # stages 0 and 2 of four are on rank 0
    cut = cut_looped([BLOCK] * 4, 2, 4, 10**9, interleaved(2), [tied])
    assert cut.stages[0].spans == ((0, 1), (2, 3)) and cut.shared_seconds == 0
    assert [stage.bytes_["state"] for stage in cut.stages] == [2 * 300 - 100, 2 * 300]


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(MemoryInfeasibleError, match=r"rank \d needs .* more than there are") as raised:
        cut_looped([EMBED, *[BLOCK] * 8, HEAD], 2, 8, 1000, interleaved(2))
    assert sum(raised.value.breakdown.values()) == pytest.approx(1000 + raised.value.missing_bytes, abs=1)
    assert cut_looped([EMBED, *[BLOCK] * 8, HEAD], 2, 8, 1000 + 2 * raised.value.missing_bytes, interleaved(2))
    with pytest.raises(StrategyError, match="too few for 6"):
        cut_looped([BLOCK] * 5, 3, 6, 10**9, interleaved(2))
    with pytest.raises(StrategyError, match="2 stages a rank"):
        cut_stages([BLOCK] * 5, 2, 6, 10**9, interleaved(2))
    assert cut_looped([BLOCK] * 5, 2, 6, 10**9, ONE_F_ONE_B) == cut_stages([BLOCK] * 5, 2, 6, 10**9, ONE_F_ONE_B)


@pytest.mark.parametrize("spread, most", [(0.0, 1e-9), (0.05, 0.03), (0.3, 0.08), (1.0, 0.15)])
def test_the_step_against_pipelines_that_are_played(spread, most):
    """Exact for equal stages, else off both ways by less than the stages differ. In flight, over all stages of a rank:
    exact."""
    rng, errors = np.random.default_rng(0), []
    for _ in range(150):
        ranks, looped = int(rng.integers(1, 6)), int(rng.integers(2, 4))
        micro_batches, count = ranks * int(rng.integers(1, 5)), ranks * looped
        forward, backward = 1 + spread * rng.random(count), 2 + 2 * spread * rng.random(count)
        pipeline = play(make("interleaved_1f1b", ranks, micro_batches, looped), forward, backward, 0.0)
        times = (forward + backward).reshape(looped, ranks).sum(0)
        errors.append(interleaved(looped).step_seconds(times, micro_batches) / pipeline.seconds - 1)
        for rank in range(ranks):
            assert pipeline.peak(rank) == pytest.approx(
                looped * interleaved(looped).in_flight(ranks, rank, micro_batches)
            )
    assert np.abs(errors).max() <= most, (min(errors), max(errors))
