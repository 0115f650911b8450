"""The stage cut is the best there is: against brute force, an OR-tools model, closed forms, and pipelines played event
by event."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from ortools.sat.python import cp_model

from autopar.errors import MemoryInfeasibleError, StrategyError
from autopar.planner.pipeline.cut import cut_stages
from autopar.planner.pipeline.model import GPIPE, ONE_F_ONE_B, ZB_H1, ZB_H2, RecomputeOption, Segment, Shared, Timing
from autopar.schedule.catalogue import make
from autopar.schedule.play import play
from tests.helpers.work import counted

from . import pipelines

TIMINGS = (GPIPE, ONE_F_ONE_B, ZB_H1, ZB_H2)
BLOCK = Segment(
    "block",
    (RecomputeOption(1.0, 2.0, 100), RecomputeOption(1.0, 3.0, 10)),
    state_bytes=300,
    transient_bytes=90,
    boundary_bytes=10,
)
EMBED = Segment("embed", (RecomputeOption(0.1, 0.2, 10),), state_bytes=500, transient_bytes=50, boundary_bytes=10)
HEAD = Segment("head", (RecomputeOption(0.8, 1.6, 40),), state_bytes=500, transient_bytes=200)


def fixed_bytes(segments, shared, first, end):
    """All but activations, of segments `first` to `end` as a stage."""
    own = range(first, end)
    state = sum(segments[i].state_bytes for i in own) - sum(
        s.bytes_ for s in shared if s.first in own and s.second in own
    )
    buffers = sum(segments[i - 1].boundary_bytes for i in (first, end) if 0 < i < len(segments))
    return state + max(segments[i].transient_bytes for i in own) + buffers


def sends(segments, first, end):
    forward = segments[end - 1].boundary_seconds[0] if end < len(segments) else 0.0
    return forward + (segments[first - 1].boundary_seconds[1] if first else 0.0)


def all_cuts(segments, stages):
    places = [i for i in range(1, len(segments)) if segments[i - 1].may_cut_after]
    for inner in itertools.combinations(places, stages - 1):
        yield list(itertools.pairwise((0, *inner, len(segments))))


def brute_force(segments, stages, micro_batches, limit, timing, shared):
    """The best step over all cuts and all levels of all segments, inf if nothing fits."""
    flight = [timing.in_flight(stages, s, micro_batches) for s in range(stages)]

    def fewest_seconds(s, first, end):
        room = limit - fixed_bytes(segments, shared, first, end)
        runs = itertools.product(*(segments[i].levels for i in range(first, end)))
        fits = (sum(l.seconds for l in run) for run in runs if flight[s] * sum(l.activation_bytes for l in run) <= room)
        return min(fits, default=math.inf) + sends(segments, first, end)

    best, known = math.inf, {}
    for spans in all_cuts(segments, stages):
        keys = [(s, *span) for s, span in enumerate(spans)]
        times = [known[key] if key in known else known.setdefault(key, fewest_seconds(*key)) for key in keys]
        apart = sum(o.seconds for o in shared if not any(a <= o.first < b and a <= o.second < b for a, b in spans))
        if max(times) < math.inf:
            best = min(best, micro_batches * max(times) + timing.bubble_factor * (sum(times) - max(times)) + apart)
    return best


def checked(segments, stages, micro_batches, limit, timing, shared=()):
    """The cut, after its numbers were counted again from what it says; None where nothing fits."""
    try:
        cut = cut_stages(segments, stages, micro_batches, limit, timing, shared)
    except MemoryInfeasibleError:
        return None
    spans = [span for stage in cut.stages for span in stage.spans]
    assert list(cut.cuts) == [0, *(end for _, end in spans[:-1])] and spans[-1][1] == len(segments)
    assert cut.bound_seconds == cut.step_seconds
    assert all(segments[first - 1].may_cut_after for first in cut.cuts[1:])
    for s, (stage, (first, end)) in enumerate(zip(cut.stages, spans)):
        own, by_kind = segments[first:end], {segment.kind: segment for segment in segments}
        counts = {kind: sum(segment.kind == kind for segment in own) for kind in {segment.kind for segment in own}}
        assert {kind: sum(levels) for kind, levels in stage.levels.items()} == counts
        runs = [(n, level) for kind, levels in stage.levels.items() for n, level in zip(levels, by_kind[kind].levels)]
        held = timing.in_flight(stages, s, micro_batches) * sum(n * level.activation_bytes for n, level in runs)
        assert stage.total_bytes == held + fixed_bytes(segments, shared, first, end) <= limit
        seconds = sum(n * level.seconds for n, level in runs) + sends(segments, first, end)
        assert stage.seconds == pytest.approx(seconds, rel=1e-12)
    step = timing.step_seconds([stage.seconds for stage in cut.stages], micro_batches) + cut.shared_seconds
    assert cut.step_seconds == pytest.approx(step, rel=1e-12)
    return cut


def drawn(seed, most_segments=8, integer=False):
    """A random problem whose memory is short more often than not."""
    rng = np.random.default_rng(seed)
    segments = pipelines.chain(rng, int(rng.integers(2, most_segments + 1)), integer=integer)
    places = 1 + sum(segment.may_cut_after for segment in segments[:-1])
    stages, micro_batches = int(rng.integers(1, places + 1)), int(rng.integers(1, 9))
    timing, shared = TIMINGS[int(rng.integers(len(TIMINGS)))], pipelines.pairs(rng, segments)
    try:
        cut_stages(segments, stages, micro_batches, 0, timing, shared)
        raise AssertionError("nothing fits 0 bytes")
    except MemoryInfeasibleError as error:
        least = error.missing_bytes
    return segments, stages, micro_batches, int(least * rng.uniform(0.95, 1.8)), timing, shared


@pytest.mark.parametrize(
    "seeds", [range(first, first + 50) for first in range(0, 300, 50)], ids=lambda seeds: f"from{seeds[0]}"
)
def test_no_cut_and_no_levels_are_better(seeds):
    fitting = 0
    for seed in seeds:
        problem = drawn(seed)
        best, cut = brute_force(*problem), checked(*problem)
        assert (cut is None) == (best == math.inf), f"seed {seed}"
        if cut is not None:
            assert cut.step_seconds == pytest.approx(best, rel=1e-9), f"seed {seed}: {cut}"
            fitting += 1
    assert fitting >= 25


def cp_sat(segments, stages, micro_batches, limit, timing, shared):
    """The same problem as a program: a stage for each segment, a level for each segment and stage. Step in thirds of a
    second (the bubble factors are thirds, seconds whole), None if nothing fits."""
    model, last = cp_model.CpModel(), len(segments) - 1
    on = [[model.new_bool_var("") for _ in range(stages)] for _ in segments]
    run = [[[model.new_bool_var("") for _ in segment.levels] for _ in range(stages)] for segment in segments]
    number = [sum(s * x for s, x in enumerate(row)) for row in on]
    for i in range(len(segments)):
        model.add_exactly_one(on[i])
        for s in range(stages):
            model.add(sum(run[i][s]) == on[i][s])
        if i:
            model.add(number[i] >= number[i - 1])
            model.add(number[i] <= number[i - 1] + (1 if segments[i - 1].may_cut_after else 0))
    model.add(number[0] == 0)
    model.add(number[last] == stages - 1)

    def both(a, b):
        x = model.new_bool_var("")
        model.add_min_equality(x, [a, b])
        return x

    together = {(k, s): both(on[o.first][s], on[o.second][s]) for k, o in enumerate(shared) for s in range(stages)}
    slowest, times = model.new_int_var(0, 10**6, ""), []
    for s in range(stages):
        flight, most = int(timing.in_flight(stages, s, micro_batches)), model.new_int_var(0, 10**6, "")
        seconds = [int(l.seconds) * x for i, segment in enumerate(segments) for l, x in zip(segment.levels, run[i][s])]
        bytes_ = [
            flight * l.activation_bytes * x
            for i, segment in enumerate(segments)
            for l, x in zip(segment.levels, run[i][s])
        ]
        for i, segment in enumerate(segments):
            model.add(most >= segment.transient_bytes * on[i][s])
            bytes_.append(segment.state_bytes * on[i][s])
            if i < last and s < stages - 1:  # a cut after segment i, between s and s + 1
                cut = both(on[i][s], on[i + 1][s + 1])
                seconds.append(int(segment.boundary_seconds[0]) * cut)
                bytes_.append(segment.boundary_bytes * cut)
            if i < last and s:
                cut = both(on[i][s - 1], on[i + 1][s])
                seconds.append(int(segment.boundary_seconds[1]) * cut)
                bytes_.append(segment.boundary_bytes * cut)
        bytes_ += [-o.bytes_ * together[k, s] for k, o in enumerate(shared)]
        model.add(sum(bytes_) + most <= limit)
        model.add(slowest >= sum(seconds))
        times.append(sum(seconds))
    bubble = round(3 * timing.bubble_factor)
    apart = sum(3 * int(o.seconds) * (1 - sum(together[k, s] for s in range(stages))) for k, o in enumerate(shared))
    model.minimize((3 * micro_batches - bubble) * slowest + bubble * sum(times) + apart)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers, solver.parameters.random_seed = 1, 0
    status = solver.solve(model)
    assert status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)
    return solver.objective_value if status == cp_model.OPTIMAL else None


def test_an_independent_program_agrees():
    fitting = 0
    for seed in range(1000, 1030):
        problem = drawn(seed, most_segments=10, integer=True)
        step, cut = cp_sat(*problem), checked(*problem)
        assert (cut is None) == (step is None), f"seed {seed}"
        if cut is not None:
            assert 3 * cut.step_seconds == pytest.approx(step, abs=1e-6), f"seed {seed}: {cut}"
            fitting += 1
    assert fitting >= 16


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("timing", [GPIPE, ONE_F_ONE_B], ids=lambda timing: timing.name)
def test_equal_blocks_make_equal_stages(timing, stages):
    cut = checked([BLOCK] * 12, stages, 7, 10**9, timing)
    assert {end - first for stage in cut.stages for first, end in stage.spans} == {
        12 // stages
    } and cut.balance == pytest.approx(1)
    assert cut.step_seconds == pytest.approx((7 + stages - 1) * 12 // stages * 3.0)
    assert cut.bubble == pytest.approx((stages - 1) / (7 + stages - 1))
    assert all(stage.levels == {"block": (12 // stages, 0)} for stage in cut.stages)


def test_zero_bubble_schedules():
    """ZB-H1 keeps a third of 1F1B's bubble and its memory, ZB-H2 none at up to twice the activations."""
    h1, h2 = (checked([BLOCK] * 12, 4, 8, 10**9, timing) for timing in (ZB_H1, ZB_H2))
    assert h1.step_seconds == pytest.approx((8 + 3 / 3) * 9.0) and h2.step_seconds == pytest.approx(8 * 9.0)
    assert [stage.in_flight for stage in h1.stages] == [4, 3, 2, 1] and [stage.in_flight for stage in h2.stages] == [
        7,
        5,
        3,
        1,
    ]


def test_recomputation_goes_where_activations_are_held():
    """1F1B's first stages hold the most, so that only they compute again, and no more blocks than it takes."""
    cut = checked([BLOCK] * 12, 4, 8, 2000, ONE_F_ONE_B)
    again = [stage.levels["block"][1] for stage in cut.stages]
    assert cut.cuts == (0, 3, 6, 9) and again == sorted(again, reverse=True)
    for stage, count in zip(cut.stages, again):
        free = 2000 - stage.total_bytes
        assert count == 0 or free < stage.in_flight * 90, "one block fewer would have fitted"


@pytest.mark.parametrize("seed", range(20))
def test_more_memory_is_never_slower(seed):
    segments, stages, micro_batches, limit, timing, shared = drawn(seed, most_segments=24)
    steps = [checked(segments, stages, micro_batches, limit * k / 10, timing, shared) for k in range(8, 31)]
    steps = [math.inf if cut is None else cut.step_seconds for cut in steps]
    assert all(more <= less * (1 + 1e-12) for less, more in itertools.pairwise(steps)), f"seed {seed}: {steps}"


def test_tied_parameters():
    """One copy on one stage, two copies and a reduction on two; and where the reduction is dear, the two segments stay
    together."""
    model, tied = [EMBED, *[BLOCK] * 6, HEAD], Shared(0, 7, 400, 0.5)
    alone = checked(model, 1, 8, 10**9, ONE_F_ONE_B, [tied])
    assert alone.stages[0].bytes_["state"] == 500 + 6 * 300 + 500 - 400 and alone.shared_seconds == 0
    apart = checked(model, 2, 8, 10**9, ONE_F_ONE_B, [tied])
    assert sum(stage.bytes_["state"] for stage in apart.stages) == 500 + 6 * 300 + 500 and apart.shared_seconds == 0.5
    assert apart.step_seconds == checked(model, 2, 8, 10**9, ONE_F_ONE_B).step_seconds + 0.5
    for seconds, cuts in ((0.5, {6}), (1000.0, {5, 9})):  # between the two, or beside both
        cut = checked([BLOCK] * 12, 2, 8, 10**9, ONE_F_ONE_B, [Shared(5, 8, 100, seconds)])
        assert cut.cuts[1] in cuts


def u_net():
    """Convolutions at five resolutions down and up: fewer pixels, more channels, skip connections held all along."""
    down = [(f"down{k}", 4.0 / 1.5**k, 64 // 2**k) for k in range(5) for _ in range(2)]
    up = [(f"up{k}", 6.0 / 1.4**k, 96 // 2**k) for k in reversed(range(5)) for _ in range(2)]
    return [
        Segment(kind, (RecomputeOption(t, 2 * t, b), RecomputeOption(t, 3 * t, b // 4)), 10)
        for kind, t, b in (*down, *up)
    ]


def encoder_decoder():
    """Short cheap encoder layers on a long sequence, dear decoder layers with cross-attention, a large head."""
    parts = [("embed", 0.3, 1), ("encoder", 1.0, 12), ("bridge", 0.2, 1), ("decoder", 1.7, 12), ("head", 2.2, 1)]
    return [
        Segment(kind, (RecomputeOption(t, 2 * t, 50), RecomputeOption(t, 3 * t, 5)), 10)
        for kind, t, n in parts
        for _ in range(n)
    ]


@pytest.mark.parametrize("model, stages, even", [(u_net, 2, True), (u_net, 4, True), (u_net, 8, False),
                                                 (encoder_decoder, 2, True), (encoder_decoder, 4, True)])  # fmt: skip
def test_stages_of_unequal_pieces_are_balanced(model, stages, even):
    """With micro-batches that make the bubble small, the balance is the best of all cuts, which is within 1.10 for all
    but the U-Net on 8 stages of 2 to 4 segments."""
    segments = model()
    before = np.cumsum([0, *(segment.levels[0].seconds for segment in segments)])
    best = (
        min(max(before[b] - before[a] for a, b in spans) for spans in all_cuts(segments, stages)) * stages / before[-1]
    )
    cut = checked(segments, stages, 64, 10**9, ONE_F_ONE_B)
    assert cut.balance == pytest.approx(best) and (best <= 1.10) == even, f"{cut.cuts}: {cut.balance}"


def test_too_little_memory_is_refused_in_numbers():
    """The bytes named are exactly those that are missing: with one byte less there is no cut, with it there is one."""
    model = [EMBED, *[BLOCK] * 8, HEAD]
    with pytest.raises(
        MemoryInfeasibleError, match=r"stage \d, segments \d to \d, needs .* more than there are"
    ) as raised:
        cut_stages(model, 4, 8, 500, ONE_F_ONE_B, [Shared(0, 9, 400, 0.5)])
    need = 500 + raised.value.missing_bytes
    assert sum(raised.value.breakdown.values()) == need and "fix:" in str(raised.value)
    assert checked(model, 4, 8, need, ONE_F_ONE_B, [Shared(0, 9, 400, 0.5)]) is not None
    assert checked(model, 4, 8, need - 1, ONE_F_ONE_B, [Shared(0, 9, 400, 0.5)]) is None


def test_what_cannot_be_cut_is_refused():
    whole = Segment("whole", BLOCK.levels, may_cut_after=False)
    for segments, stages in (([BLOCK] * 3, 4), ([whole] * 5, 2), ([], 1)):
        with pytest.raises(StrategyError, match="too few") as raised:
            cut_stages(segments, stages, 8, 10**9, GPIPE)
        assert "fix: use " in str(raised.value)
    with pytest.raises(StrategyError, match="not the same"):
        cut_stages([BLOCK, Segment("block", BLOCK.levels[:1])], 1, 8, 10**9, GPIPE)
    for stages, micro_batches in ((0, 8), (2, 0)):
        with pytest.raises(StrategyError, match="no pipeline"):
            cut_stages([BLOCK] * 3, stages, micro_batches, 10**9, GPIPE)


def test_the_step_against_pipelines_that_are_played():
    """GPipe: never less than played, and by exactly what its docstring says; 1F1B: never less, and less than the stages
    after the slowest one more; both exact for stages of equal seconds. Micro-batches in flight are those of the
    schedule."""
    rng = np.random.default_rng(0)
    for case in range(300):
        stages, micro_batches, spread = int(rng.integers(1, 7)), int(rng.integers(1, 20)), rng.choice([0.0, 0.1, 1.0])
        forward, backward = 1 + spread * rng.random(stages), 2 + 2 * spread * rng.random(stages)
        times = forward + backward
        for timing in (GPIPE, ONE_F_ONE_B):
            pipeline = play(make(timing.name, stages, micro_batches), forward, backward, 0.0)
            played, held = pipeline.seconds, [pipeline.peak_of_stage(s) for s in range(stages)]
            assert held == [timing.in_flight(stages, s, micro_batches) for s in range(stages)]
            step, slowest = timing.step_seconds(times, micro_batches), int(times.argmax())
            if timing is GPIPE:
                late = (micro_batches - 1) * (forward.max() + backward.max() - times.max())
                assert played == pytest.approx(step + late) and late > -1e-9, f"case {case}"
            else:
                assert -1e-9 <= step - played <= times[slowest + 1 :].sum() + 1e-9, f"case {case}"
            if not spread:
                assert played == pytest.approx(step), f"case {case}"


def test_any_schedule_can_be_described():
    """Half a micro-batch in flight, no bubble: what is described is what is solved."""
    odd = Timing("odd", 0.5, lambda stages, stage, micro_batches: 0.5 + stage)
    cut = checked([BLOCK] * 6, 3, 4, 10**9, odd)
    assert cut.step_seconds == pytest.approx(4 * 6.0 + 0.5 * 12.0) and cut.stages[1].bytes_["activations"] == 1.5 * 200


@pytest.mark.parametrize("stages", [16, 64])
def test_a_long_model_is_cut_in_few_calls(stages):
    """Most of them are of numpy: two searches over all pairs of borders at once, stage by stage."""
    model, limit = [EMBED, *[BLOCK] * 126, HEAD], 600 * 126 / stages + 3600
    cut, calls = counted(cut_stages, model, stages, 512, limit, ONE_F_ONE_B, [Shared(0, 127, 400, 0.5)])
    assert calls < 15_000 and any(stage.levels.get("block", (0, 0))[1] for stage in cut.stages)
