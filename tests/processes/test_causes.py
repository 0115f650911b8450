"""The cause of a wait is found from what the others answer."""

from __future__ import annotations

import pytest

from autopar.processes import causes
from autopar.processes.causes import Progress
from autopar.processes.peers import CUT_OFF, GONE, SILENT, UNKNOWN

HERE = Progress(call=9, position=3, step=4, what="the all_reduce[dp] of y", doing="the backward graph")
NORM = dict(call=9, position=1, step=4, what="the norm of the gradients", doing="the norm of the gradients")
MACHINES = (0, 0, 1, 1)


def _at(call: int, position: int, what: str = "the all_gather[dp] of x") -> dict:
    return dict(call=call, position=position, step=4, what=what, doing="the backward graph")


@pytest.mark.parametrize(("answers", "kind", "ranks", "said"), [
    ({1: _at(9, 3), 2: GONE, 3: SILENT}, "gone", [2], "rank 2 died: no process answers any more"),
    ({1: _at(9, 1), 2: _at(9, 2, "user.py:3 in main")}, "late", [2], "rank 2 is at user.py:3 in main, step 4"),
    ({1: _at(9, 1), 2: _at(9, 3), 3: _at(9, 3)}, "behind", [1], "rank 1 is at the all_gather[dp] of x"),
    ({1: SILENT, 2: _at(9, 3)}, "late", [1], "rank 1 does not answer: it is stopped"),
    ({1: _at(9, 3), 2: CUT_OFF, 3: CUT_OFF}, "late", [2, 3], "machine 1 (ranks 2, 3) cannot be reached: cut off"),
    ({1: _at(9, 3), 3: CUT_OFF}, "late", [3], "rank 3 cannot be reached: cut off"),
    ({1: _at(9, 3), 2: NORM, 3: _at(9, 5)}, "apart", [2], "rank 2 waits at the norm of the gradients, step 4; ranks 0, "
     "1, 3 wait at the all_reduce[dp] of y, in the backward graph, step 4"),
    ({1: NORM}, "apart", [0, 1], "rank 1 waits at the norm of the gradients"),
    ({1: {"cause": dict(kind="failed", ranks=[3], what="rank 3 failed")}, 2: GONE}, "failed", [3], "rank 3 failed"),
])  # fmt: skip
def test_who_keeps_a_rank_waiting(answers, kind, ranks, said):
    cause = causes.found(answers, 0, HERE, MACHINES, waited=True)
    assert (cause.kind, cause.ranks) == (kind, ranks) and said in cause.what, cause


def test_who_cannot_be_asked_is_not_said_to_have_died():
    answers = {1: _at(9, 3), 2: UNKNOWN, 3: UNKNOWN}
    assert causes.found(answers, 0, HERE, MACHINES, waited=True) is None
    assert causes.unknown(answers).what == "a collective failed, and ranks 2, 3 cannot be asked why"
    assert "though every rank that was asked answers" in causes.unknown({1: _at(9, 3)}).what


def test_a_dead_rank_is_named_at_once_and_a_late_one_after_the_wait():
    assert causes.found({1: GONE}, 0, HERE, MACHINES, waited=False).kind == "gone"
    assert causes.found({1: SILENT, 2: _at(9, 2)}, 0, HERE, MACHINES, waited=False) is None
