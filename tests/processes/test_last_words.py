"""Tests of what logs say of processes that a library aborted: which rank, why, and where its threads were."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cli.main import main
from autopar.errors import InputError
from autopar.processes import last_words
from autopar.processes.causes import Cause, Progress
from autopar.processes.diagnosis import of_all
from autopar.processes.last_words import LastWords
from autopar.processes.records import Record, files_of

ABORT = "import os; os.abort()"
IN_A_THREAD_OF_C = """
import ctypes, time
libc = ctypes.CDLL(None)
libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, libc.abort, None)
time.sleep(30)
"""


def ended(code: str, rank: int = 2, before: str = "") -> str:
    """Return what a watched process prints that is aborted."""
    signs = f"last_words.signed(threading.Event().wait, {rank}, 4, '0badcafe')"
    start = f"import sys, threading\nfrom autopar.processes import last_words\n{before}\nlast_words.tell()\n"
    start += f"threading.Thread(target={signs}, daemon=True).start()\n"
    run = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, timeout=120)
    assert run.returncode == -signal.SIGABRT
    return run.stderr


def record(rank: int, died: int) -> Record:
    """Return the record of a rank that saw another one die."""
    return Record(
        run="0badcafe", rank=rank, world=4, machine=0, host="a", process=1, when="2026-01-01 00:00:00 UTC",
        torch="2.13", plans={}, place=Progress(7, 1, 3, "the all_reduce[dp] of y"),
        cause=Cause("gone", [died], f"rank {died} died: no process answers any more"), answers={}, calls=[],
        collectives=[], stack=["train.py:5 in step"],
    )  # fmt: skip


def log_of(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "stderr.log"
    file.write_text(text)
    return file


def test_a_process_says_which_rank_it_was_and_where(tmp_path):
    why = "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  8 vs 4\n"
    code = f"def step():\n    sys.stderr.write({why!r}); sys.stderr.flush()\n    import os; os.abort()\nstep()"
    (found,) = last_words.read(log_of(tmp_path, "epoch 1\n" + ended(code)))
    assert (found.rank, found.world, found.run, found.error) == (2, 4, "0badcafe", "Aborted")
    assert found.reason == "what():  8 vs 4"
    assert [name for _, name in found.current] == ["step", "<module>"] and len(found.others) == 1
    (said,) = of_all([record(rank, 2) for rank in (0, 1, 3)], [found])
    assert said[2] == "rank 2 was ended by a fault in a library: Aborted, after 'what():  8 vs 4'"
    assert said[3].startswith("the thread of rank 2 that failed was at <string>:")
    assert said[4].startswith("another thread of rank 2 at ") and "threading.py" in said[4]
    assert not any("left no record" in line for line in said)


def test_a_thread_of_the_library_fails_while_the_program_waits(tmp_path):
    (found,) = last_words.read(log_of(tmp_path, ended(IN_A_THREAD_OF_C)))
    assert found.rank == 2 and not found.current
    (said,) = of_all([], [found])
    assert said[0] == "run 0badcafe, 4 ranks: no records"
    assert said[2].startswith("the thread of rank 2 that failed runs no Python; its program was at <string>:")


def test_several_processes_write_to_one_log(tmp_path):
    """torchrun puts a prefix before the lines of each; without one, one follows on the other."""
    texts = [ended(ABORT, rank).splitlines() for rank in (1, 3)]
    mixed = [f"[default{i}]:{line}" for lines in zip(*texts) for i, line in enumerate(lines)]
    assert {w.rank for w in last_words.read(log_of(tmp_path, "\n".join(mixed)))} == {1, 3}
    assert {w.rank for w in last_words.read(log_of(tmp_path, "\n".join(texts[0] + ["text"] + texts[1])))} == {1, 3}


def test_who_says_no_rank_is_the_one_that_left_nothing(tmp_path):
    unsigned = LastWords(None, None, None, "Segmentation fault", "", (("a.py:3", "f"),), ())
    left = [record(rank, 2) for rank in (0, 1, 3)]
    assert "rank 2 was ended by a fault in a library: Segmentation fault" in of_all(left, [unsigned])[0]
    several = of_all(left[:2], [unsigned])
    assert len(several) == 2 and several[1][0] == "no records" and "nothing says the rank" in several[1][1]
    assert any("rank 2 left no record" in line for line in several[0])
    other_run = replace(unsigned, rank=0, world=2, run="00000001")
    assert of_all(left, [other_run])[1][0] == "run 00000001, 2 ranks: no records"


def test_the_line_of_the_program_is_named_beside_that_of_a_library():
    way = (
        ("/x/site-packages/torch/a.py:3", "all_reduce"),
        ("/x/autopar/runtime/b.py:9", "call"),
        ("/u/train.py:7", "f"),
    )
    said = of_all([], [LastWords(0, 2, "00000001", "Aborted", "", way, ((), way, way))])[0]
    where = "/x/site-packages/torch/a.py:3 in all_reduce, called from /u/train.py:7 in f"
    assert said[2:] == [f"the thread of rank 0 that failed was at {where}", f"2 other threads of rank 0 at {where}"]


def test_doctor_reads_logs_and_records(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("AUTOPAR_RECORDS", str(tmp_path))
    log_of(tmp_path, ended(ABORT))
    for rank in (0, 1, 3):
        record(rank, 2).write()
    assert main(["doctor", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "records of ranks 0, 1, 3, none of rank 2" in printed and "rank 2 was ended by a fault" in printed
    assert [file.name for file in files_of([str(tmp_path)])][-1] == "stderr.log"


@pytest.mark.parametrize("text", ["", "all is well\n", "Fatal Python error", "\0" * 100], ids=len)
def test_a_log_without_last_words_is_told_of(text, tmp_path, capsys):
    assert main(["doctor", str(log_of(tmp_path, text))]) == 2
    assert "no process says in" in capsys.readouterr().err


def test_forged_text_is_bounded_and_printable(tmp_path):
    frame = '  File "a\x1b[31m.py", line 1 in ' + "f" * 10**4
    text = "Fatal Python error: \x07\n" + "Thread 0x1 (most recent call first):\n" * 3000 + (frame + "\n") * 300
    (found,) = last_words.read(log_of(tmp_path, text))
    assert len(found.others) <= last_words.MOST_THREADS and found.rank is None
    text = "Fatal Python error: x\nCurrent thread 0x1 (most recent call first):\n" + (frame + "\n") * 300
    (found,) = last_words.read(log_of(tmp_path, text))
    assert len(found.current) == last_words.MOST_FRAMES and "\x1b" not in "".join(map("".join, found.current))
    with pytest.raises(InputError, match="cannot be read"):
        last_words.read(tmp_path / "none.log")


@pytest.mark.parametrize("before, shown", [("", True), ("import io; sys.stderr = io.StringIO()", False)])
def test_nothing_is_said_where_stderr_is_no_file(before, shown):
    assert ('File "<string>"' in ended(ABORT, before=before)) == shown


SCRIPT = """
import os, torch, torch.distributed as dist
from datetime import timedelta
from autopar.processes import last_words, watch
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
last_words.tell()
watch.start()
dist.all_reduce(torch.ones(4 if dist.get_rank() else 4096))
"""


@pytest.mark.slow
@pytest.mark.gloo
def test_gloo_that_is_sent_more_than_it_waits_for(tmp_path):
    """Two ranks reduce tensors of different sizes, which gloo answers with an abort."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               "--log-dir", str(tmp_path / "logs"), "--redirects", "3", str(script)]  # fmt: skip
    subprocess.run(command, capture_output=True, timeout=120, env=os.environ | {"AUTOPAR_RECORDS": "off"})
    words = [w for file in files_of([str(tmp_path / "logs")]) for w in last_words.read(file)]
    assert words and {w.world for w in words} == {2} and {w.rank for w in words} <= {0, 1}
    for w in words:
        log = next((tmp_path / "logs").rglob(f"{w.rank}/stderr.log"))  # torchrun's folder of that rank
        assert f"rank {w.rank} of 2 in run {w.run}" in log.read_text()
    assert any("script.py:8" in place for w in words for thread in (w.current, *w.others) for place, _ in thread)
