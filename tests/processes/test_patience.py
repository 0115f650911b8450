"""Tests that a rank waits for others between steps as long as they answer."""

from __future__ import annotations

import threading
import time

import pytest

from autopar.processes import patience
from autopar.processes.calls import Call
from autopar.processes.causes import Progress
from autopar.processes.patience import Patience
from autopar.processes.peers import CUT_OFF, GONE, SILENT, UNKNOWN

HERE = Progress(1, 1, 0, "the plan of rank 0", "the plan of rank 0")
PLANNING = {"call": 0, "position": 1 << 30, "step": 0, "what": "plan.py:1 in plan", "doing": "", "cause": None}
TOLD = {"kind": "failed", "ranks": [3], "what": "rank 3 failed"}


class _Peers:
    """Peers of rank 0 that give the answers of a list, and the last of them from then on."""

    rank, machines = 0, (0, 0, 1, 1)

    def __init__(self, *answers):
        self.answers = [*answers]

    def ask(self, message, ranks):
        others = [rank for rank in ranks if rank != self.rank]
        answer = self.answers.pop(0) if len(self.answers) > 1 and others else self.answers[0]
        return dict.fromkeys(others, answer)


def _looks(monkeypatch, *answers) -> tuple[float, str]:
    """Return after how many seconds of waiting a rank gives up, one look a second, and what it says."""
    now = [0.0]
    monkeypatch.setattr(patience.time, "monotonic", lambda: now[0])
    monkeypatch.setenv("AUTOPAR_TIMEOUT_S", "10")
    waits = Patience(_Peers(*answers), (0, 2))
    while now[0] < 1000:
        now[0] += 1.0
        if (cause := waits.look(HERE)) is not None:
            return now[0], cause.what
    return now[0], ""


@pytest.mark.parametrize(("answers", "seconds", "said"), [
    ([PLANNING], 1000, ""),
    ([UNKNOWN], 1000, ""),
    ([PLANNING, GONE], 2, "rank 2 died: no process answers any more"),
    ([CUT_OFF], 10, "rank 2 cannot be reached: cut off, or its machine is down"),
    ([SILENT], 10, "rank 2 does not answer: it is stopped"),
    ([PLANNING, *[SILENT] * 9, PLANNING, SILENT], 21, "rank 2 does not answer: it is stopped"),
    ([PLANNING, PLANNING | {"cause": TOLD}], 2, "rank 3 failed"),
], ids=str)  # fmt: skip
def test_a_rank_waits_for_those_who_live(answers, seconds, said, monkeypatch):
    assert _looks(monkeypatch, *answers) == (seconds, said)


def test_a_call_can_be_given_up():
    go = threading.Event()
    call = Call(go.wait)
    assert not call.is_over(0.01)
    go.set()
    assert call.is_over(5) and call.result is True
    failed = Call(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        while not failed.is_over(1):
            time.sleep(0)
