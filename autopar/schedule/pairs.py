"""Forwards beside the backwards of micro-batches before them, as one action each, along the stages of a pipeline.

    rank 0   0F0  0F1  0F2  0F3+0B0  0F4+0B1  0B2 ...
    rank 1   1F0  1F1+1B0  1F2+1B1  1F3+1B2 ...

A pair begins when both of it can, and what it sends leaves when both have ended. So a rank does two forwards more
before its first backward than the rank after it, and the last rank one: while a pair's messages go to the next rank and
back, the rank has one more pair to do, and nobody waits but at both ends. The idle time is that of the same schedule
without pairs. With one stage a rank 2 p micro-batches are in flight on the first one, not p; with several one more
forward is ahead than without pairs, as in Megatron-LM.
"""

from __future__ import annotations

from dataclasses import replace

from ..errors import ScheduleError
from .actions import Schedule
from .phases import actions_of, forwards_first, interleaved, round_size

KINDS_IN_PAIRS = ("1f1b", "interleaved_1f1b")


def in_pairs(schedule: Schedule) -> Schedule:
    """Return a schedule's stages and micro-batches in pairs. Raise ScheduleError for a schedule that has none in its
    order."""
    if schedule.stages > 1 and schedule.name not in KINDS_IN_PAIRS:
        raise ScheduleError(
            f"schedule {schedule.name} has no pairs of forwards and backwards in {schedule.stages} stages",
            fix=f"plan with {' or '.join(KINDS_IN_PAIRS)}",
        )
    p, v, m = schedule.ranks, schedule.stages_per_rank, schedule.micro_batches
    orders = [actions_of(interleaved(rank, p, m, v, "B", 1), schedule.stages_of(rank), m) for rank in range(p)]
    kinds = ["".join(action.kind for action in order) for order in orders]
    size = round_size(p, m)
    most = v * size * -(-m // size)  # forwards of a rank, those of a last round that is filled up too
    has_pairs = [forwards_first(rank, p, m, v, "B") + 1 < most for rank in range(p)]
    alone = [own.index("B") - 1 if has else own.count("F") for own, has in zip(kinds, has_pairs)]
    return replace(schedule, orders=tuple(map(tuple, orders)), pairs=tuple(alone))
