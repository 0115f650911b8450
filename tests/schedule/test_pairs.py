"""Forwards beside backwards along stages: orders end, nobody waits longer, messages have one order on both sides."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from autopar.errors import ScheduleError
from autopar.schedule.actions import Schedule
from autopar.schedule.catalogue import make
from autopar.schedule.pairs import in_pairs
from autopar.schedule.play import check, play
from autopar.schedule.transfers import awaited, receives, sent


def paired(ranks: int, stages_per_rank: int, micro_batches: int) -> Schedule:
    name = "1f1b" if stages_per_rank == 1 else "interleaved_1f1b"
    return in_pairs(make(name, ranks, micro_batches, stages_per_rank))


@pytest.mark.parametrize("v", [1, 2, 3, 4])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8])
def test_all_orders_end(p, v):
    """Whatever the micro-batches; a pair is of two micro-batches, and no rank has fewer pairs than its forwards left
    behind the first ones allow."""
    for m in range(1, 6 * p):
        schedule = paired(p, v, m)
        check(schedule)
        for rank in range(p):
            both = [together for together in schedule.together(rank) if len(together) == 2]
            assert all(forward.micro_batch != backward.micro_batch for forward, backward in both)
            assert [a for together in schedule.together(rank) for a in together] == [*schedule.orders[rank]]


@pytest.mark.parametrize("seed", range(10))
def test_the_step_is_that_without_pairs_less_what_pairs_gain(seed):
    """(m v + p - 1) (F + B) - (m v - (v - 1) p - 1) g in whole rounds, and as many are in flight as forwards ahead."""
    print(f"seed {seed}")
    draw = random.Random(seed)
    p, v = draw.randint(1, 6), draw.randint(1, 4)
    m = p * draw.randint(2, 5)
    forward, backward = draw.uniform(0.5, 1.0), draw.uniform(1.0, 2.0)
    gained = draw.uniform(0.0, 0.4)
    schedule = paired(p, v, m)
    played = play(schedule, forward, backward / 2, backward / 2, gained_seconds=gained)
    pairs = m * v - (v - 1) * p - 1
    assert played.seconds == pytest.approx((m * v + p - 1) * (forward + backward) - pairs * gained)
    assert sum(len(together) == 2 for together in schedule.together(p - 1)) == pairs
    assert played.peaks == tuple((v - 1) * p + 2 * (p - 1 - rank) + 2 for rank in range(p))
    assert played.busy[p - 1] == pytest.approx(m * v * (forward + backward) - pairs * gained)


def test_a_pair_of_two_stages_gains_what_the_smaller_does():
    schedule = paired(1, 2, 4)
    both = [together for together in schedule.together(0) if len(together) == 2]
    crossing = sum(forward.stage != backward.stage for forward, backward in both)
    played = play(schedule, 1.0, 1.0, 1.0, gained_seconds=[0.5, 0.1])
    own = [sum(f.stage == b.stage == stage for f, b in both) for stage in (0, 1)]
    assert crossing and played.seconds == pytest.approx(24 - 0.1 * crossing - 0.5 * own[0] - 0.1 * own[1])


@pytest.mark.parametrize("p,v,m", [(2, 1, 2), (2, 1, 7), (4, 1, 9), (2, 2, 4), (3, 2, 7), (4, 3, 16)])
def test_messages_have_one_order_on_both_sides(p, v, m):
    """All that a rank waits for is received once, in the order in which the other one sends it."""
    schedule = paired(p, v, m)
    rank_of, sends = schedule.rank_of_stage, defaultdict(list)
    for rank, order in enumerate(schedule.orders):
        for action in order:
            message = sent(action, schedule.stages)
            if message is not None and rank_of[message.stage] != rank:
                sends[rank, rank_of[message.stage], message.kind].append(message)
    for rank in range(p):
        begun, came = receives(schedule, rank), defaultdict(list)
        for message in (message for action in schedule.orders[rank] for message in begun[action]):
            before = rank_of[message.stage + (-1 if message.kind == "F" else 1)]
            came[before, rank, message.kind].append(message)
        assert came == {key: messages for key, messages in sends.items() if key[1] == rank}
        at = {message: i for i, action in enumerate(schedule.orders[rank]) for message in begun[action]}
        waits = {awaited(action, schedule.stages): i for i, action in enumerate(schedule.orders[rank])}
        assert all(at[message] <= waits[message] for message in at)


def test_a_schedule_in_pairs_is_read_as_it_was_written():
    schedule = paired(3, 2, 7)
    assert Schedule.from_json(schedule.to_json()) == schedule
    with pytest.raises(ScheduleError, match="field 'pairs'"):
        Schedule.from_json(schedule.to_json().replace('"pairs": [', '"pairs": [1.5, '))


def test_other_schedules_have_none():
    with pytest.raises(ScheduleError, match="no pairs of forwards and backwards in 2 stages") as error:
        in_pairs(make("gpipe", 2, 4))
    assert "1f1b or interleaved_1f1b" in str(error.value)
