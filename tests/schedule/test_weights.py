import pytest

from autopar.errors import ScheduleError
from autopar.schedule.phases import actions_of, one_stage
from autopar.schedule.weights import fill_weights


def filled(ranks, m, limit, seconds=(1.0, 1.0, 1.0)):
    orders = [actions_of(one_stage(ranks - 1 - rank, m, "I"), (rank,), m) for rank in range(ranks)]
    return [" ".join(map(str, order)) for order in fill_weights(orders, ranks, limit, seconds)]


def test_w_waits_where_there_is_other_work():
    assert filled(2, 2, limit=2) == ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"]


def test_w_makes_room():
    assert filled(1, 3, limit=1) == ["0F0 0I0 0W0 0F1 0I1 0W1 0F2 0I2 0W2"]
    assert filled(1, 3, limit=3) == ["0F0 0I0 0F1 0I1 0F2 0I2 0W0 0W1 0W2"]


def test_w_fills_the_time_until_the_next_one_is_there():
    """The second micro-batch of the last rank comes from the limit of the first: it has a W to do meanwhile."""
    assert filled(2, 3, limit=2) == ["0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"]


def test_too_little_memory():
    with pytest.raises(ScheduleError, match="1 micro-batches in flight are too few"):
        filled(2, 2, limit=1)
