"""Pipelines that cannot end, or whose stages do not fit together, are refused before they start."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.errors import DesyncError, ScheduleError
from autopar.runtime.pipeline_check import Border, check_pipeline
from autopar.schedule.catalogue import KINDS, make

HIDDEN = ("add_3", (2, 16, 32), "float32")
GRADIENT = ("add_9", (2, 16, 32), "float32")


def borders(stages: int) -> dict[int, Border]:
    def border(i: int) -> Border:
        before, after = i > 0, i < stages - 1
        return Border((HIDDEN,) * before, (HIDDEN,) * after, (GRADIENT,) * after, (GRADIENT,) * before)

    return {i: border(i) for i in range(stages)}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_schedule_passes(name, ranks):
    schedule = make(name, ranks, 5)
    check_pipeline(schedule, borders(schedule.stages))


@pytest.mark.parametrize("field", ["received", "sent", "arriving", "returned"])
@pytest.mark.parametrize(
    "change", [(), (HIDDEN, HIDDEN), (("add_3", (2, 16, 31), "float32"),), (("add_3", (2, 16, 32), "bfloat16"),)]
)
def test_a_message_that_nobody_expects_is_named(field, change):
    schedule, wrong = make("1f1b", 3, 4), borders(3)
    wrong[1] = replace(wrong[1], **{field: change})
    with pytest.raises(DesyncError, match=r"add_|nothing"):
        check_pipeline(schedule, wrong)


def test_a_schedule_that_waits_for_itself_is_refused():
    schedule = make("1f1b", 2, 2)
    first, *others = schedule.orders[0]
    stuck = replace(schedule, orders=((others[-1], first, *others[:-1]), *schedule.orders[1:]))
    with pytest.raises(ScheduleError):
        check_pipeline(stuck, borders(2))
