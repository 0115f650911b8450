import random
import sys
from collections import Counter
from dataclasses import replace

import pytest

from autopar.errors import ScheduleError
from autopar.schedule import KINDS, Action, Schedule, check, make, play
from tests.helpers.bubble_formulas import in_flight
from tests.helpers.crossings import crossings


def random_case(seed):
    draw = random.Random(seed)
    name = draw.choice(list(KINDS))
    schedule = make(name, draw.randint(1, 7), draw.randint(1, 20), KINDS[name].chunks or draw.randint(1, 4))
    per_stage = [
        [draw.choice((0.0, draw.random(), draw.random() * 3)) for _ in range(schedule.stages)] for _ in range(3)
    ]
    return schedule, per_stage, [draw.random() for _ in range(schedule.stages - 1)]


@pytest.mark.parametrize("seed", range(60))
def test_dependencies_hold(seed):
    schedule, (forward, input_, weight), transfer = random_case(seed)
    played = play(schedule, forward, input_, weight, transfer)
    told = f"seed {seed}: {schedule.name}, {schedule.ranks} ranks, {schedule.micro_batches} micro-batches"
    start, end, clock = {}, {}, {}
    for rank, action, s, e in played:
        assert s >= clock.get(rank, 0.0), told  # in order, one at a time
        clock[rank] = e
        start[action], end[action] = s, e
    p, m = schedule.ranks, schedule.micro_batches
    for rank, peak in enumerate(played.peaks):
        assert peak <= in_flight(schedule.name, p, m, rank, schedule.stages_per_rank), told
        assert played.peak(rank, until_input=True) <= peak, told
    last, rank_of = schedule.stages - 1, schedule.rank_of_stage

    def arrives(action, border):
        return end[action] + (0.0 if rank_of[border] == rank_of[border + 1] else transfer[border])

    for stage in range(schedule.stages):
        for i in range(schedule.micro_batches):
            backward = [Action(k, s, i) for s in (stage, stage + 1) for k in "BI" if Action(k, s, i) in start]
            f, b = Action("F", stage, i), backward[0]
            assert end[f] - start[f] == pytest.approx(forward[stage]), told
            assert start[b] >= end[f], told
            if stage:
                assert start[f] >= arrives(Action("F", stage - 1, i), stage - 1), told
            if stage < last:
                assert start[b] >= arrives(backward[1], stage), told
            if b.kind == "I":
                assert start[Action("W", stage, i)] >= end[b], told
            else:
                assert end[b] - start[b] == pytest.approx(input_[stage] + weight[stage]), told


@pytest.mark.parametrize("seed", range(60))
def test_every_action_begins_as_early_as_it_can(seed):
    """No gap without a reason: with all times doubled, all starts double; with one rank, nobody waits."""
    schedule, seconds, transfer = random_case(seed)
    once = play(schedule, *seconds, transfer)
    twice = play(schedule, *[[2 * s for s in row] for row in seconds], [2 * t for t in transfer])
    assert [s for *_, s, _ in twice] == pytest.approx([2 * s for *_, s, _ in once]), f"seed {seed}"
    assert sum(once.busy) == pytest.approx(sum(map(sum, seconds)) * schedule.micro_batches), f"seed {seed}"
    alone = make(schedule.name, 1, schedule.micro_batches)
    assert play(alone).bubble == 0.0, f"seed {seed}"


def test_transfer_by_hand():
    played = play(make("1f1b", 2, 1), 1.0, 2.0, 3.0, 0.5)
    assert [(str(a), s, e) for _, a, s, e in played] == [
        ("0F0", 0, 1),
        ("0B0", 8, 13),
        ("1F0", 1.5, 2.5),
        ("1B0", 2.5, 7.5),
    ]
    assert (played.seconds, played.busy, played.windows) == (13, (6, 6), (13, 6))
    assert (played.bubble, played.bubble_in_window) == (pytest.approx(14 / 26), pytest.approx(14 / 26))


def test_nothing_is_transferred_at_the_turn_of_a_v():
    assert play(make("zbv", 1, 1), transfer_seconds=9.0).seconds == 6.0


def test_what_is_held():
    played = play(make("zb_h1", 2, 4), activation=[3.0, 5.0])
    assert played.peaks == (6.0, 10.0)
    assert played.peak(1, until_input=True) == 5.0  # the last stage has its input gradient at once
    v = play(make("zbv", 4, 12))
    assert v.peak(0) == 8 <= v.peak_of_stage(0) + v.peak_of_stage(7)
    assert [play(make("1f1b", 4, 12)).peak_of_stage(stage) for stage in range(4)] == [4, 3, 2, 1]


def changed(schedule, rank, change):
    orders = [list(order) for order in schedule.orders]
    change(orders[rank])
    return replace(schedule, orders=tuple(map(tuple, orders)))


def swapped(schedule, rank, a, b):
    def change(order):
        i, j = order.index(Action.parse(a)), order.index(Action.parse(b))
        order[i], order[j] = order[j], order[i]

    return changed(schedule, rank, change)


def test_a_deadlock_names_where_each_rank_stands():
    with pytest.raises(ScheduleError, match="deadlocks") as error:
        check(swapped(make("1f1b", 2, 4), 1, "1F0", "1B0"))
    assert error.value.stuck == {0: "0B0", 1: "1B0"}
    assert "rank 0 stands at 0B0 and waits for 1B0; rank 1 stands at 1B0 and waits for 1F0" in str(error.value)
    assert error.value.fix


def test_a_deadlock_across_ranks():
    with pytest.raises(ScheduleError) as error:
        check(swapped(make("gpipe", 3, 2), 1, "1F1", "1B0"))
    assert error.value.stuck == {0: "0B0", 1: "1B0", 2: "2F1"}


def test_two_ranks_that_wait_for_one_action():
    with pytest.raises(ScheduleError) as error:
        check(swapped(make("gpipe", 3, 2), 1, "1F0", "1B0"))
    assert "rank 1 stands at 1B0 and waits for 1F0; rank 2 stands at 2F0 and waits for 1F0" in str(error.value)


def test_another_order_without_deadlock_is_fine():
    check(swapped(make("gpipe", 3, 2), 1, "1B1", "1B0"))


def moved(order_from, order_to):
    order_to.append(order_from.pop())


@pytest.mark.parametrize("name, change, message", [
    ("1f1b", lambda order: order.pop(), "missing: 1B3"),
    ("1f1b", lambda order: order.remove(Action("F", 1, 2)), "missing: 1F2"),
    ("zb_h1", lambda order: order.remove(Action("W", 1, 0)), "missing: 1W0"),
    ("zb_h1", lambda order: order.remove(Action("I", 1, 0)), "missing: 1I0"),
    ("1f1b", lambda order: order.append(Action("F", 1, 0)), "twice: 1F0"),
    ("1f1b", lambda order: order.append(Action("F", 0, 0)), "twice: 0F0"),
    ("1f1b", lambda order: order.append(Action("F", 2, 0)), "2F0 on rank 1"),
    ("1f1b", lambda order: order.append(Action("F", 1, 4)), "1F4 on rank 1"),
    ("1f1b", lambda order: order.append(Action("W", 1, 0)), "whole and in parts: 1FBW0"),
    ("1f1b", lambda order: order.clear(), "missing: 1FB0, 1FB1, 1FB2, 1FB3"),
])  # fmt: skip
def test_what_is_not_complete(name, change, message):
    with pytest.raises(ScheduleError, match=message):
        check(changed(make(name, 2, 4), 1, change))


def test_a_stage_of_the_wrong_rank():
    with pytest.raises(ScheduleError, match="0F0 on rank 0"):
        check(replace(make("1f1b", 2, 2), rank_of_stage=(1, 0)))
    with pytest.raises(ScheduleError, match="1 ranks"):
        check(replace(make("1f1b", 2, 2), ranks=1))


def test_as_many_numbers_as_stages():
    with pytest.raises(ScheduleError, match="3 numbers for 2"):
        play(make("1f1b", 2, 2), [1, 1, 1])


def test_an_empty_schedule():
    played = play(Schedule("none", 1, 0, (), ((),)))
    assert (played.seconds, played.bubble, played.bubble_in_window, played.peaks) == (0.0, 0.0, 0.0, (0.0,))


def test_messages_in_the_order_they_are_needed():
    """All but two schedules need messages in the order in which they are sent (and one more with 2 ranks, where both
    neighbours of a stage are on the other rank)."""
    crossing = {
        (name, p) for name in KINDS for p in (2, 3, 4, 8) for m in (2 * p, 3 * p) if crossings(make(name, p, m))
    }
    assert crossing == {("zbv", p) for p in (2, 3, 4, 8)} | {("dualpipev", p) for p in (3, 4, 8)} | {
        ("interleaved_zero_bubble", 2)
    }
    assert crossings(swapped(make("gpipe", 3, 2), 1, "1B1", "1B0")) == [(1, 0), (2, 1)]


def test_an_action_is_looked_at_three_times_at_most(monkeypatch):
    """Once when its rank comes to it, and once more for each of the two actions that it may wait for."""
    schedule, asked, module = make("zbv", 32, 128), Counter(), sys.modules[play.__module__]
    needs = module.needs
    monkeypatch.setattr(module, "needs", lambda action, stages: asked.update([action]) or needs(action, stages))
    played = play(schedule)
    assert len(asked) == sum(map(len, schedule.orders)) and max(asked.values()) <= 3
    assert played.bubble_in_window == pytest.approx(0.0)
