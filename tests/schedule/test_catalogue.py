import pytest

from autopar.errors import StrategyError
from autopar.schedule import KINDS, check, make, play

SIZES = [
    (p, m) for p in (1, 2, 3, 4, 5, 8) for m in sorted({1, 2, 3, p - 1, p, p + 1, 2 * p - 1, 2 * p, 3 * p + 1} - {0})
]


def chunks_of(name):
    return (KINDS[name].chunks,) if KINDS[name].chunks else (1, 2, 3, 4)


@pytest.mark.parametrize("name", KINDS)
def test_complete_and_without_deadlock(name):
    for p, m in SIZES:
        for v in chunks_of(name):
            schedule = make(name, p, m, v)
            check(schedule)
            assert (schedule.ranks, schedule.micro_batches, schedule.stages) == (p, m, p * v)
            assert all(len(schedule.stages_of(rank)) == v for rank in range(p))


@pytest.mark.parametrize("other, name", [
    ("pipedream_flush", "1f1b"), ("1F1B", "1f1b"), ("GPipe", "gpipe"), ("Interleaved1F1B", "interleaved_1f1b"),
    ("InterleavedZeroBubble", "interleaved_zero_bubble"), ("ZBVZeroBubble", "zbv"), ("DualPipeV", "dualpipev"),
    ("ZB-H1", "zb_h1"), ("v-half", "v_half"),
])  # fmt: skip
def test_other_spellings(other, name):
    assert make(other, 2, 4) == make(name, 2, 4)


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(StrategyError, match="no pipeline schedule 'gpip'") as error:
        make("gpip", 2, 2)
    assert error.value.fix == f"use gpipe; there are {', '.join(KINDS)}"


def test_a_name_like_none_gets_each_once():
    with pytest.raises(StrategyError) as error:
        make("nonsense", 2, 2)
    assert error.value.fix == f"use one of {', '.join(KINDS)}"


@pytest.mark.parametrize("arguments, message", [
    (("1f1b", 0, 2), "0 ranks"),
    (("1f1b", 2, 0), "0 micro-batches"),
    (("1f1b", 2, 2.0), "2.0 micro-batches"),
    (("1f1b", True, 2), "True ranks"),
    (("interleaved_1f1b", 2, 2, 0), "0 stages a rank"),
    (("1f1b", 2, 2, 2), "1 stage a rank, not 2"),
    (("zbv", 2, 2, 3), "2 stages a rank, not 3"),
])  # fmt: skip
def test_impossible_sizes(arguments, message):
    with pytest.raises(StrategyError, match=message) as error:
        make(*arguments)
    assert error.value.fix


def test_seconds_never_make_it_longer():
    for seconds in ((1, 1.2, 0.8), (1, 0.9, 1.1), (2, 3, 1), (1, 2, 2), (1, 1, 0.25)):
        for name in KINDS:
            v = make(name, 2, 2).stages_per_rank
            known, unknown = (play(make(name, 4, 9, v, s), *seconds).seconds for s in (seconds, None))
            assert known <= unknown, (name, seconds)
    assert play(make("v_half", 4, 16, 2, (2, 3, 1)), 2, 3, 1).seconds < play(make("v_half", 4, 16), 2, 3, 1).seconds
