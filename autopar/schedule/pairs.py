"""One stage whose forwards run beside the backwards of the micro-batches before them.

    F0  F1+B0  F2+B1  ...  B(m-1)

Between the first forward and the last backward all are in pairs, and two micro-batches are in flight while one runs.
"""

from __future__ import annotations

from dataclasses import replace

from ..errors import ScheduleError
from .actions import Schedule
from .phases import actions_of, one_stage


def in_pairs(schedule: Schedule) -> Schedule:
    """Return the same stage and micro-batches in pairs. Raise ScheduleError for several stages: what a pair sends would
    leave only when both of it have ended."""
    if schedule.stages > 1:
        raise ScheduleError(
            f"schedule {schedule.name} has {schedule.stages} stages, and pairs of forwards and backwards need one",
            fix="plan again for a mesh without an axis pp",
        )
    order = actions_of(one_stage(1, schedule.micro_batches, "B"), (0,), schedule.micro_batches)
    return replace(schedule, orders=(tuple(order),), pairs=True)
