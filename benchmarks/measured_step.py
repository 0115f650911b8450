"""Measure a step of one of several gloo processes: CPU time, bytes on the loopback interface, resident memory."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.bytes import sent_on_loopback
from benchmarks.peers import _status_bytes

WARM_UP = 2  # steps that are not counted


@dataclass
class Measured:
    """Holds what one process measured: medians of seconds and of bytes on the interface, the most memory, the loss."""

    seconds: float
    bytes_: float
    peak_bytes: int
    loss: float


def memory_follows_tensors() -> None:
    """Let resident memory follow the tensors of this process; called before there are any."""
    warnings.filterwarnings("ignore")
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "set below"  # which a compile leaves as it is then
    ctypes.CDLL("libc.so.6").mallopt(-3, 2**14)  # M_MMAP_THRESHOLD


def measured_step(step: Callable[[], torch.Tensor], steps: int) -> Measured:
    """Return what a step, which gives the loss, takes, over so many of them, on all processes together."""
    seconds, sent = [], []
    for _ in range(steps + WARM_UP):
        dist.barrier()
        before, start = sent_on_loopback(), time.process_time()
        loss = step()
        seconds.append(time.process_time() - start)
        dist.barrier()
        sent.append(sent_on_loopback() - before)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
    resident = _status_bytes("VmRSS")
    step()
    peak = _status_bytes("VmHWM") - resident
    return Measured(statistics.median(seconds[WARM_UP:]), statistics.median(sent[WARM_UP:]), peak, float(loss))
