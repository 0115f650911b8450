"""Orders of asynchronous pipelines: the versions that a play meets are those of the closed forms and of the papers'
rules."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from autopar.errors import ScheduleError, StrategyError
from autopar.schedule import Action, make, play
from autopar.schedule.asynchronous import BUFFERED, NAMES, STASHING, VERTICAL, Asynchronous, Update


@dataclass(frozen=True)
class PlayedVersions:
    """used: the version that (stage, micro-batch) read. held: by stage, how many versions there were after each of its
    actions."""

    used: dict[tuple[int, int], int]
    held: tuple[tuple[int, ...], ...]


def play_versions(schedule: Asynchronous, micro_batches: int) -> PlayedVersions:
    """Play the orders by what each rule says, not by the closed forms: weight stashing takes the newest version that
    the stage has at the forward; the others what stage 0 had at the first forward of the group. Raise ScheduleError for
    a version that is not there."""
    orders = schedule.orders(micro_batches)
    used: dict[tuple[int, int], int] = {}
    held = []
    for stage, order in enumerate(orders):
        newest, counts = 0, []
        for at, action in enumerate(order):
            if isinstance(action, Update):
                newest += 1
            elif action.kind == "F":
                i = action.micro_batch
                first = i - i % schedule.group
                met = newest if stage == 0 or schedule.name == STASHING else used[0, first]
                used[stage, i] = used[stage, first] if i > first else met
                if used[stage, i] > newest:
                    raise ScheduleError(
                        f"stage {stage} has version {newest} when micro-batch {i} needs {used[stage, i]}"
                    )
            counts.append(_count_held(schedule, order, at, newest, used, stage))
        held.append(tuple(counts))
    return PlayedVersions(used, tuple(held))


def _count_held(
    schedule: Asynchronous,
    order: Sequence[Action | Update],
    at: int,
    newest: int,
    used: Mapping[tuple[int, int], int],
    stage: int,
) -> int:
    """Count the versions there already that the rest of the order reads, and the newest."""
    flying: Counter[int] = Counter()
    for action in order[: at + 1]:
        if isinstance(action, Action):
            flying[action.micro_batch] += 1 if action.kind == "F" else -1
    versions = {used[stage, i] for i, count in flying.items() if count} | {newest}
    if stage and schedule.name != STASHING:  # stage 0 has said which versions will be read
        coming = (a.micro_batch for a in order[at + 1 :] if isinstance(a, Action) and a.kind == "F")
        versions |= {v for i in coming if (v := used[0, i]) <= newest}
    return len(versions)


def cases():
    for stages in (2, 3, 4, 7):
        yield from ((Asynchronous(name, stages), 4 * stages + 1) for name in (STASHING, VERTICAL))
        yield from ((Asynchronous(BUFFERED, stages, group), 6 * group) for group in (stages, stages + 1, 3 * stages))


@pytest.mark.parametrize("schedule, micro_batches", cases(), ids=str)
def test_a_play_meets_the_versions_of_the_closed_form(schedule, micro_batches):
    for many in (micro_batches, schedule.group):  # no micro-batch at all of the steady state, too
        played = play_versions(schedule, many)
        assert played.used == {(s, i): schedule.version_of(s, i) for s in range(schedule.stages) for i in range(many)}
        assert all(max(held) <= schedule.versions_held(s) for s, held in enumerate(played.held))
    played = play_versions(schedule, micro_batches)
    assert [max(held) for held in played.held] == [schedule.versions_held(s) for s in range(schedule.stages)]


def test_versions_held_in_the_steady_state():
    """PipeDream holds p - s in every micro-batch once no version is met twice, until it runs empty; 2BW never more than
    two."""
    schedule = Asynchronous(STASHING, 4)
    for stage, order in enumerate(schedule.orders(20)):
        held = play_versions(schedule, 20).held[stage]
        steady = [count for action, count in zip(order, held) if action.kind == "F" and 6 <= action.micro_batch]
        assert set(steady) == {4 - stage} and len(steady) == 14
        rules = Asynchronous(STASHING, 4), Asynchronous(VERTICAL, 4), Asynchronous(BUFFERED, 4, 4)
        assert [rule.versions_held(stage) for rule in rules] == [4 - stage, 4, 2]


def test_papers():
    """Update t is of the gradient at w_s[t-p+1+s] in stage s (PipeDream), at w_0[t-p+1] on all (vertical sync), at
    w[t-1] (2BW)."""
    p = 4
    stashing, vertical, buffered = Asynchronous(STASHING, p), Asynchronous(VERTICAL, p), Asynchronous(BUFFERED, p, 6)
    for t in range(p, 12):
        assert [stashing.version_of(s, t) for s in range(p)] == [t - p + 1 + s for s in range(p)]
        assert [vertical.version_of(s, t) for s in range(p)] == [t - p + 1] * p
        assert {buffered.version_of(s, i) for s in range(p) for i in range(6 * t, 6 * t + 6)} == {t - 1}


def test_order_is_1f1b_and_never_flushes():
    schedule = Asynchronous(STASHING, 3)
    assert " ".join(map(str, schedule.orders(4)[1])) == "1F0 1F1 1B0 1U1 1F2 1B1 1U2 1F3 1B2 1U3 1B3 1U4"
    for name, group in ((STASHING, 1), (VERTICAL, 1), (BUFFERED, 5)):
        schedule = Asynchronous(name, 3, group)
        assert schedule.without_updates(20).orders == make("1f1b", 3, 20).orders
    idle = [play(Asynchronous(STASHING, 4).without_updates(n)).bubble for n in (8, 80)]
    assert idle[1] == pytest.approx(3 / 83) and idle[0] == pytest.approx(3 / 11)  # the two ends alone


@pytest.mark.parametrize("name", NAMES)
def test_needed_versions_are_those_that_the_rest_reads(name):
    draw = random.Random(name)
    for _ in range(20):
        stages = draw.randint(2, 6)
        schedule = Asynchronous(name, stages, draw.randint(stages, 9) if name == BUFFERED else 1)
        total = schedule.group * draw.randint(1, 8)
        for stage, order in enumerate(schedule.orders(total)):
            forwards = backwards = newest = 0
            for at, action in enumerate(order):
                forwards += action.kind == "F"
                backwards += action.kind == "B"
                rest = {schedule.version_of(stage, a.micro_batch) for a in order[at + 1 :] if a.kind in "FB"}
                if action.kind == "U":  # before the new version is there
                    found = {v for v in schedule.needed(stage, backwards, forwards, forwards < total) if v <= newest}
                    assert found >= {v for v in rest if v <= newest} and len(
                        found | {newest + 1}
                    ) <= schedule.versions_held(stage)
                    if total - forwards >= stages:  # near the end it is only known that there may be forwards to come
                        assert found == {v for v in rest if v <= newest}
                    newest = action.version


def test_refusals():
    with pytest.raises(StrategyError, match="no asynchronous schedule 'pipedrem'"):
        Asynchronous("pipedrem", 2)
    with pytest.raises(StrategyError, match="as many micro-batches an update as stages, 4, not 3"):
        Asynchronous(BUFFERED, 4, 3)
    with pytest.raises(StrategyError, match="after every micro-batch"):
        Asynchronous(STASHING, 4, 4)
    with pytest.raises(StrategyError, match="1 stages"):
        Asynchronous(VERTICAL, 1)
    with pytest.raises(ScheduleError, match="no whole groups of 4"):
        Asynchronous(BUFFERED, 4, 4).orders(6)
