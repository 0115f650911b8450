"""Tests of jobs that save into one folder: one at a time, and none takes what another writes for what is left."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import random
import shutil
import signal
from pathlib import Path

import pytest

import autopar
from autopar.errors import CheckpointError
from autopar.storage import tensor_file
from autopar.storage.folder_lock import NAME, FolderLock

from .test_checkpoint import names_of, regressor


def test_one_has_it_and_the_others_are_told_who(tmp_path):
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.take(0)
    said = f"process {os.getpid()} of .* is saving into {tmp_path}, and has been for 0.2 s"
    with pytest.raises(CheckpointError, match=said):
        second.take(0.2)
    with second.if_free() as is_free:
        assert not is_free and not second.is_held
    first.release()
    assert names_of(tmp_path) == []
    with second.if_free() as is_free:
        assert is_free and second.is_held
    second.release()
    assert not second.is_held and names_of(tmp_path) == []


def test_a_file_system_without_locks_has_none(tmp_path, monkeypatch):
    def flock(*args):
        raise OSError("no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    lock = FolderLock(tmp_path)
    lock.take(0)
    assert lock.is_held


def _takes_turns(folder: Path, seed: int) -> None:
    """Write a word where nobody else may, and see that it stays; now and then die with the lock."""
    rng, lock = random.Random(seed), FolderLock(folder / "locked")
    for turn in range(60):
        lock.take(30)
        (folder / "word").write_text(f"{seed} {turn}")
        for _ in range(rng.randrange(20)):
            os.sched_yield()
        if (folder / "word").read_text() != f"{seed} {turn}":
            (folder / "wrong").touch()
        if turn == 50 and seed == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        lock.release()


def test_processes_take_turns(tmp_path):
    """The lock of one that dies is free, and its file is taken over."""
    (tmp_path / "locked").mkdir()
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_takes_turns, args=(tmp_path, seed)) for seed in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
    assert [process.exitcode for process in processes] == [-signal.SIGKILL, 0, 0]
    assert not (tmp_path / "wrong").exists()
    last = FolderLock(tmp_path / "locked")
    last.take(0)  # of one that died, if it was the last
    last.release()
    assert names_of(tmp_path / "locked") == []


def test_a_save_beside_that_of_another_job(alone, tmp_path, monkeypatch):
    """It waits, and takes nothing away of what the other one writes; a save that fails gives the lock back."""
    model = regressor(alone)
    monkeypatch.setenv("AUTOPAR_TIMEOUT_S", "0.1")
    other = FolderLock(tmp_path)
    other.take(0)
    (unfinished := tmp_path / ".step-00000007.unfinished").mkdir()
    for wait in (True, False):
        with pytest.raises(CheckpointError, match="is saving into .* for 0.1 s.*\n.*give each run a folder of its own"):
            autopar.save_checkpoint(tmp_path, model, step=1, wait=wait)
    assert names_of(tmp_path) == [NAME, unfinished.name]
    other.release()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 30, 1 << 30, 0))
    with pytest.raises(CheckpointError, match="has 0 B left"):
        autopar.save_checkpoint(tmp_path, model, step=1)
    monkeypatch.undo()
    write, taken = tensor_file.FileForLater.write, []
    monkeypatch.setattr(
        tensor_file.FileForLater, "write", lambda file: taken.append((tmp_path / NAME).exists()) or write(file)
    )
    path = autopar.save_checkpoint(tmp_path, model, step=2, wait=False)
    autopar.finish_checkpoint()
    assert all(taken) and taken and names_of(tmp_path) == [path.name]
