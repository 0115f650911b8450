"""A GPU that stands still in a collective: who keeps it waiting is said, and the program wakes up or ends.

The device is a stand-in on gloo processes: marks that are never reached. What aborts and ends the process is noted.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist

from autopar.errors import AutoparError
from autopar.processes import watch
from autopar.processes.heartbeat import Beats, Heartbeat
from autopar.processes.watch import Watch
from tests.helpers import gloo

TIMEOUT_SECONDS = 1.0
VICTIM = 1


class Unreached:
    """A mark behind a collective that does not end."""

    def query(self) -> bool:
        return False


class Reached:
    def query(self) -> bool:
        return True


def _rank(rank: int, fault: str, wakes: bool, folder: str) -> dict:
    os.environ |= {"AUTOPAR_TIMEOUT_S": str(TIMEOUT_SECONDS), "AUTOPAR_RECORDS": folder}
    watch.start()
    here = watch._current
    done: list[str] = []

    def abort() -> None:
        done.append("aborted")
        if wakes:  # as the next call of the model does
            here.calls += 1
            with contextlib.suppress(AutoparError):
                here.check_alike("the forward graph")

    beats = Beats(Unreached, abort, lambda code: done.append(f"ended with {code}"), waking_seconds=0.5)
    here.step = here.calls = 2
    dist.barrier()
    if rank == VICTIM:
        here.calls = 1  # it has not made the call that the others wait in
        if fault == "die":
            here.peers.close()  # nobody answers any more
        time.sleep(8 * TIMEOUT_SECONDS)
        return {}
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        here.heartbeat = Heartbeat(here, is_needed=True, beats=beats)
        here.heartbeat.mark(here.calls, here.step, "the forward graph")
        start = time.monotonic()
        end = start + 6 * TIMEOUT_SECONDS
        while time.monotonic() < end and not done:
            time.sleep(0.01)
        seconds = time.monotonic() - start
        time.sleep(1.0)
    return {"done": done, "said": said.getvalue(), "failed": here.failed_at is not None, "seconds": seconds}


@pytest.mark.gloo
@pytest.mark.parametrize(("fault", "wakes", "words"), [
    ("die", True, "rank 1 died: no process answers any more"),
    ("sleep", False, "rank 1 is at test_heartbeat.py"),
])  # fmt: skip
def test_who_keeps_the_device_waiting_is_named(fault, wakes, words, tmp_path):
    """A process that does not wake up is ended."""
    found = gloo.run(2, _rank, fault, wakes, str(tmp_path))[0]
    assert words in found["said"] and "rank 0: " in found["said"], found["said"]
    assert found["done"] == (["aborted"] if wakes else ["aborted", "ended with 1"]) and found["failed"] == wakes
    assert (found["seconds"] < TIMEOUT_SECONDS) == (fault == "die"), found  # a dead rank is not waited for
    (record,) = (json.loads(file.read_text()) for file in Path(tmp_path).glob("*-rank-00000.json"))
    assert words in record["cause"]["what"] and record["cause"]["ranks"] == [VICTIM]


def test_marks_that_are_reached_say_nothing(monkeypatch):
    beat = object.__new__(Heartbeat)
    beat.is_needed, beat.marks, beat.since, beat.beats = True, deque(), 0.0, Beats(Reached)
    beat.longest_seconds = 0.0
    for call in range(3):
        beat.mark(call, 1, "the forward graph")
    assert len(beat.marks) == 3 and beat.at() is None and not beat.marks


def test_nothing_is_marked_on_gloo():
    beat = Heartbeat(cast(Watch, None), is_needed=False, beats=Beats(mark=partial(pytest.fail, "marked")))
    beat.mark(1, 1, "the forward graph")
    assert not beat.marks and not torch.cuda.is_initialized()
