"""The processes that `autopar train` starts on this machine, one a device.

They are forked from a server that has imported what all of them need, which is done once and not by each of them, also
when a run goes on with other processes.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path

import torch.multiprocessing as mp

from .. import _torch
from ..errors import AutoparError
from .elastic import GROWS, LostRanks
from .stop_signals import SIGNALS, StopSignals
from .train_rank import in_process

GRACE_SECONDS = 4  # for processes to end by themselves when another one failed
LEAVING_SECONDS = 60  # with --elastic, where they write what they hold


def run(settings: dict, devices: int) -> int:
    """Run one process a device. All have ended when this returns (the exit code) or raises, however it does."""
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # it tells of every process that it stops
    with tempfile.TemporaryDirectory(prefix="autopar-") as folder:
        arguments = (devices, folder, settings, dict(os.environ))
        method = start_method()
        processes = mp.start_processes(in_process, arguments, devices, join=False, daemon=True, start_method=method)

        def stop_all(number: int) -> None:
            for process in processes.processes:
                process.terminate()

        with StopSignals(stop_all, numbers=(*SIGNALS, GROWS) if settings["elastic"] else SIGNALS) as stop:
            try:
                # one that fails raises here, when the others had time to say what they saw, and are ended
                grace_seconds = LEAVING_SECONDS if settings["elastic"] else GRACE_SECONDS
                while not processes.join(timeout=1, grace_period=grace_seconds):
                    pass
            except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
                if stop.received:
                    return stop.code
                lost = [rank for rank, process in enumerate(processes.processes) if _is_lost(process)]
                if settings["elastic"] and lost:
                    raise LostRanks(lost, _reason(folder)) from None
                if reason := _reason(folder):
                    raise reason from None
                print(f"autopar: {str(error).strip()}", file=sys.stderr)
                return 1
            finally:
                for process in processes.processes:
                    if process.is_alive():
                        process.kill()
                    process.join()
    return 0


def start_method() -> str:
    """Return how processes are started: from a server, which runs when this returns, where there is such a thing."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    multiprocessing.set_forkserver_preload(["autopar.cli.train_rank", *_torch.LATE_IMPORTS])
    # signals that go to all processes at once are the ranks' to answer, which unblock them, and not the server's
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return "forkserver"


def _is_lost(process) -> bool:
    """Return whether a process was ended by a signal but that which ends those that remain."""
    return process.exitcode is not None and process.exitcode < 0 and process.exitcode != -signal.SIGTERM


def _reason(folder: str) -> AutoparError | None:
    """Return the AutoparError that a process wrote down before it ended, None if none did."""
    for file in sorted(Path(folder).glob("error-*.json")):
        message, fix = json.loads(file.read_text())
        return AutoparError(message, fix=fix)
    return None
