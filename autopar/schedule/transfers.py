"""List what the ranks of a schedule send each other: when they begin to receive it, and when it is known to have
arrived.

A message is named by the action that waits for it, in which a backward is B, in parts or not: `1F0` is what stage 0
sends to stage 1 of micro-batch 0, `0B0` the gradient that comes back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from .actions import Action, Schedule
from .play import needs

STEP = {"F": 1, "B": -1, "I": -1}  # from a stage to the one that reads what it makes


def awaited(action: Action, stages: int) -> Action | None:
    """Return the message that an action waits for, if it waits for one."""
    kind, stage, i = action
    if kind not in STEP or not (0 <= stage < stages and 0 <= stage - STEP[kind] < stages):
        return None
    return Action("F" if kind == "F" else "B", stage, i)


def sent(action: Action, stages: int) -> Action | None:
    """Return the message that an action sends, if it sends one."""
    kind, stage, i = action
    return awaited(Action(kind, stage + STEP[kind], i), stages) if kind in STEP else None


def receives(schedule: Schedule, rank: int) -> dict[Action, list[Action]]:
    """Return, for each action of a rank, the messages from other ranks that it begins to receive before it.

    They are those that have been sent when all ranks do one action at a time. So all sends and receives of two ranks
    have one order on both, the order in which the messages are sent, and none waits for one that comes behind it: not
    even where all of them are on one stream, as with NCCL."""
    found: dict[Action, list[Action]] = {}
    waiting: list[Action] = []
    for at, action in _in_turn(schedule):
        message = sent(action, schedule.stages)
        if at == rank:
            found[action], waiting = waiting, []
        elif message is not None and schedule.rank_of_stage[message.stage] == rank:
            waiting.append(message)
    return found


def _in_turn(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Iterate over the actions of all ranks, who take turns, each after those that it needs, a pair at once."""
    done: set[Action] = set()
    left, goes_on = [deque(schedule.together(rank)) for rank in range(schedule.ranks)], True
    while goes_on:
        goes_on = False
        for rank, own in enumerate(left):
            if own and all(done.issuperset(needs(action, schedule.stages)) for action in own[0]):
                goes_on = True
                for action in own.popleft():
                    done.add(action._replace(kind="I") if action.kind == "B" else action)
                    yield rank, action


def taken_before(schedule: Schedule, rank: int) -> dict[Action, list[Action]]:
    """Return, for each message that a rank receives from another one, those of its own messages that the other had
    taken before it sent this one, and after the one before."""
    found: dict[Action, list[Action]] = {}
    for other, order in enumerate(schedule.orders):
        taken: list[Action] = []
        for action in order if other != rank else ():
            read, made = awaited(action, schedule.stages), sent(action, schedule.stages)
            if read is not None and schedule.rank_of_stage[read.stage - STEP[read.kind]] == rank:
                taken.append(read)
            if made is not None and schedule.rank_of_stage[made.stage] == rank:
                found[made], taken = taken, []
    return found
