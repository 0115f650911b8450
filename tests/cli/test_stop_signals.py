"""Signals are counted, and end a process that has nothing to wait for."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest

from autopar.cli import stop_signals
from autopar.cli.stop_signals import StopSignals, end_with_parent


@pytest.fixture
def interruptible():
    """Let Ctrl-C reach this process, also where tests run as a background job of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_first_signal_is_told_and_the_second_ends_the_process(monkeypatch, interruptible):
    told, before = [], signal.getsignal(signal.SIGTERM)
    with StopSignals(told.append) as stop:
        for _ in range(2):  # the second comes at once: a launcher passes it on
            signal.raise_signal(signal.SIGTERM)
        assert (stop.received, stop.code, told) == (15, 143, [15])
        monkeypatch.setattr(stop_signals, "REPEAT_SECONDS", 0.0)
        with pytest.raises(SystemExit) as caught:
            signal.raise_signal(signal.SIGINT)
        assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_where_nothing_is_worth_waiting_for(interruptible):
    with StopSignals(waits=False), pytest.raises(SystemExit):
        signal.raise_signal(signal.SIGINT)


def test_what_a_background_job_ignores_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            signal.raise_signal(signal.SIGINT)
        assert stop.received == 0
    finally:
        signal.signal(signal.SIGINT, before)


def _middle(pipe) -> None:
    process = multiprocessing.get_context("fork").Process(target=_child, args=(pipe,))
    process.start()
    time.sleep(60)


def _child(pipe) -> None:
    end_with_parent()
    pipe.send(os.getpid())
    time.sleep(60)


def test_a_process_ends_with_its_parent():
    ours, theirs = multiprocessing.Pipe()
    middle = multiprocessing.get_context("fork").Process(target=_middle, args=(theirs,))
    middle.start()
    theirs.close()
    assert ours.poll(10) and ours.recv() > 0
    middle.kill()
    middle.join()
    assert ours.poll(10)  # the child closed its end
    with pytest.raises(EOFError):
        ours.recv()
