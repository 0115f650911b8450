import pytest

from autopar.schedule.building_block import PERIOD, block, repeat, v_half, v_min
from autopar.schedule.play import needs


@pytest.mark.parametrize("make_block", [v_min, v_half])
def test_no_rank_is_asked_for_two_things_at_once(make_block):
    for p in range(1, 40):
        for rank, times in enumerate(make_block(p)):
            assert len({time % PERIOD for time in times}) == 4, (p, rank)


@pytest.mark.parametrize("make_block", [v_min, v_half])
def test_the_block_keeps_the_order_of_the_stages(make_block):
    for p in range(1, 10):
        last, at = 2 * p - 1, {}
        for rank, times in enumerate(make_block(p)):
            at |= zip((("F", rank), ("F", last - rank), ("I", last - rank), ("I", rank)), times)
        for order in repeat(make_block(p), 1):
            for action in order:
                for need in needs(action, 2 * p):
                    assert at[need[:2]] < at[action[:2]], (p, str(action), str(need))


def test_by_hand():
    assert block(2, (1, 2, 1, 2), (0, 1, 0)) == [(0, 4, 6, 10), (1, 2, 7, 8)]
    assert [" ".join(map(str, order)) for order in repeat(v_min(2), 2)] == [
        "0F0 3F0 3I0 0F1 0I0 3F1 3I1 0I1",
        "1F0 2F0 2I0 1I0 1F1 2F1 2I1 1I1",
    ]


def test_how_long_the_block_lives_is_the_memory():
    """Little's law: units of time in flight, over the period, is a third and a half of the 2p of 1F1B (and ZB-V)."""
    for make_block, share in ((v_min, 1 / 3), (v_half, 1 / 2)):
        for f0, f1, i1, i0 in make_block(60):
            assert ((i0 - f0) + (i1 - f1)) / PERIOD / (2 * 60) == pytest.approx(share, abs=0.03)
