"""Messages of a schedule: they meet in one order, and what was sent is let go of when it has arrived."""

from __future__ import annotations

import pytest

from autopar.schedule import KINDS, Action, make
from autopar.schedule.transfers import STEP, awaited, receives, sent, taken_before

SIZES = [(2, 1), (2, 5), (3, 2), (4, 8)]  # ranks, micro-batches


def communication(schedule, rank: int) -> list[tuple[str, int, Action]]:
    """Return (send or receive, the other rank, message) of a rank, in its order."""
    begun, found = receives(schedule, rank), []
    for action in schedule.orders[rank]:
        for message in begun[action]:
            found.append(("receive", schedule.rank_of_stage[message.stage - STEP[message.kind]], message))
        message = sent(action, schedule.stages)
        if message is not None and schedule.rank_of_stage[message.stage] != rank:
            found.append(("send", schedule.rank_of_stage[message.stage], message))
    return found


@pytest.mark.parametrize("name", KINDS)
def test_two_ranks_have_one_order_of_their_transfers(name):
    """So a stream of both, on which each transfer blocks until the other side has come to it, goes on to the end."""
    for ranks, micro_batches in SIZES:
        schedule = make(name, ranks, micro_batches)
        lists = [communication(schedule, rank) for rank in range(ranks)]
        for a in range(ranks):
            for b in range(a):
                mine, theirs = ([(kind, m) for kind, other, m in lists[x] if other == y] for x, y in ((a, b), (b, a)))
                assert [m for _, m in mine] == [m for _, m in theirs]
                assert all({x, y} == {"send", "receive"} for (x, _), (y, _) in zip(mine, theirs))


@pytest.mark.parametrize("name", KINDS)
def test_every_message_of_another_rank_is_received_before_it_is_needed(name):
    for ranks, micro_batches in SIZES:
        schedule = make(name, ranks, micro_batches)
        for rank, order in enumerate(schedule.orders):
            begun, there = receives(schedule, rank), []
            for action in order:
                there += begun[action]
                message = awaited(action, schedule.stages)
                if message is not None and schedule.rank_of_stage[message.stage - STEP[message.kind]] != rank:
                    assert message in there, (name, rank, str(action))
            assert len(there) == len({*there})


@pytest.mark.parametrize("name", KINDS)
def test_what_was_sent_is_let_go_of_once_and_after_it_was_taken(name):
    schedule = make(name, 4, 8)
    for rank, order in enumerate(schedule.orders):
        found = taken_before(schedule, rank)
        let_go = [message for taken in found.values() for message in taken]
        assert len(let_go) == len(set(let_go))
        sends = {sent(action, schedule.stages): at for at, action in enumerate(order)}
        needs = {awaited(action, schedule.stages): at for at, action in enumerate(order)}
        for received, taken in found.items():
            for message in taken:
                assert sends[message] < needs[received], (name, rank, str(message), str(received))
                assert schedule.rank_of_stage[message.stage] != rank


def test_one_forward_one_backward_keeps_what_is_in_flight():
    schedule = make("1f1b", 4, 16)
    for rank in range(3):
        found, flying, most = taken_before(schedule, rank), set(), 0
        for action in schedule.orders[rank]:
            flying -= {*found.get(awaited(action, 4), ())}
            flying |= {sent(action, 4)} if action.kind == "F" else set()
            most = max(most, sum(message.kind == "F" for message in flying))
        assert most <= 4 - rank + 1, (rank, most)
    assert taken_before(schedule, 0)[Action("B", 0, 0)][0] == Action("F", 1, 0)
