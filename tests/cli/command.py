"""The command `autopar` as a process, for tests that look at its output, its end and what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

MLP = ["--model", "mlp-tiny:layers=1", "--mesh", "dp=2,tp=2", "--batch", "4", "--seq", "4"]


def autopar(
    *words: str,
    background: bool = False,
    launcher: Sequence[str] = ("-m", "autopar.cli"),
    stderr: IO | int = subprocess.PIPE,
    **environment: str,
) -> subprocess.Popen:
    """Start the command in a process group of its own, which an interrupt reaches even where this one ignores it, as
    shells make background jobs do; `background`: it ignores interrupts."""
    interrupt = signal.SIG_IGN if background else signal.SIG_DFL
    return subprocess.Popen(
        [sys.executable, *launcher, *words], stdout=subprocess.PIPE, stderr=stderr, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, interrupt),
    )  # fmt: skip


def ranks_of(process: subprocess.Popen) -> list[int]:
    """Return the processes of the ranks of `autopar train`, in their order."""
    server = next(pid for pid in children_of(process.pid) if b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return sorted(children_of(server))


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started, but for those that have ended."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def left_of(process: subprocess.Popen) -> bool:
    """Return whether a process of its group is still there some seconds later."""
    for _ in range(50):
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.1)
    return True
