"""Tests of what ranks leave of a failure, and of what that says together."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import replace

import pytest

from autopar.cli.main import main
from autopar.errors import InputError
from autopar.processes.causes import Cause, Progress
from autopar.processes.diagnosis import sentences
from autopar.processes.records import RUNS_KEPT, Record, files_of

FORWARD, BACKWARD, NORM = "the forward graph", "the backward graph", "the norm of the gradients"
DIED = Cause("gone", [2], "rank 2 died: no process answers any more")


def _record(
    rank: int, *doing: str, what: str = "", cause: Cause = DIED, stages: int = 1, torch: str = "2.13"
) -> Record:
    """Return the record of a rank that made the calls `doing` and waits in the last one."""
    calls = [(7 + i, 3, call) for i, call in enumerate(doing)]
    return Record(
        run="0badcafe", rank=rank, world=3, machine=0, host="a", process=1, when="2026-01-01 00:00:00 UTC",
        torch=torch, plans={"abc": stages}, place=Progress(calls[-1][0], 1, 3, what or doing[-1], doing[-1]),
        cause=cause, answers={}, calls=calls, collectives=["all_reduce[dp] of y"],
        stack=[f"train.py:{5 + rank} in step"],
    )  # fmt: skip


def test_a_rank_that_died_leaves_no_record():
    what = "the all_reduce[dp] of y"
    assert sentences([_record(1, FORWARD, BACKWARD, what=what), _record(0, FORWARD, BACKWARD, what=what)]) == [
        "run 0badcafe, 3 ranks, 2026-01-01 00:00:00 UTC: records of ranks 0, 1, none of rank 2",
        "rank 2 died: no process answers any more (ranks 0, 1 say so)",
        "rank 2 left no record: killed, stopped, out of reach, or the file was not given",
        "ranks 0, 1 wait at the all_reduce[dp] of y, in the backward graph, step 3",
    ]


def test_the_call_that_is_another_one_is_named():
    apart = Cause("apart", [1], "rank 1 waits elsewhere")
    both = [_record(rank, FORWARD, BACKWARD, cause=apart) for rank in (0, 2)]
    said = sentences([*both, _record(1, FORWARD, NORM, cause=apart, torch="3")])
    assert said[-3:] == [
        "rank 1's program is at train.py:6 in step",
        "call 8 is the backward graph of step 3 on ranks 0, 2, the norm of the gradients of step 3 on rank 1; those "
        "before are alike",
        "torch 2.13 on ranks 0, 2; 3 on rank 1",
    ]
    assert (
        "call 8 is the backward graph of step 3 on ranks 0, 2, not made on rank 1"
        in sentences([*both, _record(1, FORWARD)])[-1]
    )
    stages = [_record(0, FORWARD, stages=2), _record(1, BACKWARD, stages=2)]
    assert not any(line.startswith("call") for line in sentences(stages))


def test_doctor_reads_what_was_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("AUTOPAR_RECORDS", str(tmp_path))
    written = [_record(rank, FORWARD) for rank in range(3)]
    assert [Record.read(record.write()) for record in written] == written
    assert main(["doctor", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == sentences(written)
    monkeypatch.setenv("AUTOPAR_RECORDS", "off")
    assert written[0].write() is None
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUTOPAR_RECORDS", str(tmp_path / "file"))
    assert written[0].write() is None  # that is no folder


def test_the_last_runs_stay_in_the_folder_for_temporary_files(tmp_path, monkeypatch):
    """In a folder of the user's own all do."""
    for is_own in (True, False):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setenv("AUTOPAR_RECORDS", str(tmp_path / "own") if is_own else "")
        for number in range(RUNS_KEPT + 2):
            for rank in range(2):
                file = replace(_record(rank, FORWARD), run=f"{number:08x}").write()
                os.utime(file, (number, number))
        (file.parent / "notes.txt").touch()
        runs = {file.name[:8] for file in file.parent.glob("*-rank-*")}
        first = 0 if is_own else 2
        assert (
            runs == {f"{number:08x}" for number in range(first, RUNS_KEPT + 2)} and (file.parent / "notes.txt").exists()
        )


@pytest.mark.parametrize("change", [
    {"rank": 3}, {"world": 1 << 40, "rank": 0}, {"place": {}}, {"place": 3}, {"calls": [1]}, {"plans": []},
    {"cause": {"what": ""}}, {"rank": 1e999}, {"stack": None}, {"answers": 4},
], ids=str)  # fmt: skip
def test_what_is_no_record_is_refused(change, tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPAR_RECORDS", str(tmp_path))
    file = _record(0, FORWARD).write()
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(InputError, match="is no record of a failure"):
        Record.read(file)


@pytest.mark.parametrize("text", ["", "[]", "[" * 10**5, "{}", '"a"'], ids=len)
def test_other_files_are_refused(text, tmp_path):
    file = tmp_path / "a-rank-0.json"
    file.write_text(text)
    with pytest.raises(InputError, match="is no record of a failure"):
        Record.read(file)


def test_where_there_is_no_record(tmp_path):
    with pytest.raises(InputError, match="there is no record"):
        files_of([str(tmp_path)])
    with pytest.raises(InputError, match="cannot be read: No such file"):
        Record.read(tmp_path / "none.json")
