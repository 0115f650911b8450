"""Schedules that are played against the closed forms of the papers."""

import pytest

from autopar.schedule import KINDS, make, play
from tests.helpers.bubble_formulas import bubble, in_flight

F_I_W = ((1.0, 1.0, 1.0), (1.0, 1.25, 0.75), (2.0, 3.0, 1.0), (2.0, 2.0, 0.5))
ANY, UNIT = F_I_W, F_I_W[:1]
EXACT = {  # name -> (is the closed form exact for p, m?, for which F, I, W)
    "naive": (lambda p, m: True, ANY),
    "gpipe": (lambda p, m: True, ANY),
    "1f1b": (lambda p, m: True, ANY),
    "interleaved_1f1b": (lambda p, m: m % p == 0, ANY),
    "zb_h1": (lambda p, m: m >= p, ANY),
    "zb_h2": (lambda p, m: m >= 2 * p - 1, ANY),
    "interleaved_zero_bubble": (lambda p, m: m % p == 0, ANY),
    "zbv": (lambda p, m: m >= 2 * p - 1, UNIT),
    "dualpipev": (lambda p, m: m >= 2 * p, UNIT),
}
GRID = [(p, m) for p in range(1, 9) for m in sorted({1, 2, 4, 5, 7, p, 2 * p - 1, 2 * p, 3 * p, 4 * p + 1})]


def chunks_of(name):
    return (KINDS[name].chunks,) if KINDS[name].chunks else (1, 2, 3, 4)


def cases(name):
    exact, durations = EXACT[name]
    return [(p, m, v, seconds) for p, m in GRID if exact(p, m) for v in chunks_of(name) for seconds in durations]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", EXACT)
def test_idle_time(name):
    for p, m, v, seconds in cases(name):
        played = play(make(name, p, m, v), *(s / v for s in seconds))
        assert played.bubble == pytest.approx(bubble(name, p, m, v, *seconds), abs=1e-9), (p, m, v, seconds)
        in_window = bubble(name, p, m, v, *seconds, in_window=True)
        assert played.bubble_in_window == pytest.approx(in_window, abs=1e-9), (p, m, v, seconds)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", EXACT)
def test_in_flight(name):
    for p, m, v, _ in cases(name):
        played = play(make(name, p, m, v))
        assert list(played.peaks) == [in_flight(name, p, m, rank, v) for rank in range(p)], (p, m, v)


@pytest.mark.parametrize("name", KINDS)
def test_in_flight_is_never_more(name):
    for p, m in GRID:
        for v in chunks_of(name):
            played = play(make(name, p, m, v))
            assert all(played.peak(rank) <= in_flight(name, p, m, rank, v) for rank in range(p)), (p, m, v)


def test_the_textbook_forms():
    for p, m in GRID:
        assert play(make("naive", p, m)).bubble == pytest.approx((p - 1) / p)
        for name in ("gpipe", "1f1b"):
            assert play(make(name, p, m)).bubble == pytest.approx((p - 1) / (m + p - 1))
        for v in (1, 2, 3, 4):
            if m % p == 0:
                assert play(make("interleaved_1f1b", p, m, v)).bubble == pytest.approx((p - 1) / (v * m + p - 1))


def test_four_stages_and_four_micro_batches():
    assert play(make("naive", 4, 1)).utilization == pytest.approx(1 / 4)
    assert play(make("gpipe", 4, 4)).utilization == pytest.approx(4 / 7)


def test_zb_h1_has_a_third_of_the_idle_time_and_the_same_memory():
    for p, m in ((2, 4), (4, 8), (8, 24)):
        one, split = play(make("1f1b", p, m)), play(make("zb_h1", p, m))
        work = 3 * m
        assert (split.seconds - work) * 3 == one.seconds - work
        assert max(split.peaks) == max(one.peaks) == p


def test_the_table_of_bubble_and_memory():
    """(bubble over 1F1B's, memory over 1F1B's): ZB-1P 1/3, 1; ZB-2P 0, 2; ZBV 0, 1; V-Half 1/2, 1/2; V-Min 2/3, 1/3."""
    paper = {"zb_h1": (1 / 3, 1), "zb_h2": (0, 2), "zbv": (0, 1), "v_half": (1 / 2, 1 / 2), "v_min": (2 / 3, 1 / 3)}
    for p in range(2, 17):
        for m in (3 * p, 5 * p + 1):
            work, one = 3 * m, play(make("1f1b", p, m))
            for name, (said, memory) in paper.items():
                v = KINDS[name].chunks
                played = play(make(name, p, m), 1 / v, 1 / v, 1 / v)
                idle = (max(played.windows) - work) / (one.seconds - work)
                assert said - 0.6 / p <= idle <= said + 1e-9, (
                    name,
                    p,
                    m,
                    idle,
                )  # V-Half and V-Min do a little better
                if said in (0, 1 / 3):
                    assert idle == pytest.approx(said)
                assert memory - 1 / p <= max(played.peaks) / v / max(one.peaks) <= memory + 5 / 3 / p, (name, p, m)
