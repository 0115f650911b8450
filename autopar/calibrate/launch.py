"""Starts the processes that measure, waits for them, and leaves none running; under torchrun they are there already."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from ..errors import HardwareError
from . import measure

BACKENDS = ("gloo", "nccl")


def check(backend: str, world: int) -> None:
    """Raise HardwareError where this machine cannot run so many processes with this backend."""
    if backend not in BACKENDS:
        raise HardwareError(f"there is no backend {backend!r}", fix=f"use {' or '.join(BACKENDS)}")
    if backend == "nccl" and (not dist.is_nccl_available() or torch.cuda.device_count() < world):
        found = torch.cuda.device_count() if dist.is_nccl_available() else 0
        raise HardwareError(
            f"nccl needs {world} GPUs, there are {found}", fix="use --backend gloo, or a smaller --world"
        )


def measurements(backend: str, world: int, quick: bool = False, limit_seconds: float = 600.0) -> dict:
    """Return what autopar/calibrate/measure.py measures, in `world` processes of one thread each. Raises HardwareError
    if a process fails or takes longer than the limit; none is left running."""
    check(backend, world)
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
        arguments = (world, backend, quick, folder)
        context = multiprocessing.start_processes(
            measure.main, arguments, nprocs=world, join=False, start_method="spawn"
        )
        deadline = time.monotonic() + limit_seconds
        try:
            while not context.join(timeout=1):
                if time.monotonic() > deadline:
                    raise HardwareError(f"no result after {limit_seconds:.0f} s", fix="run it alone, or with --quick")
        except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException) as error:
            cause = str(error).strip().splitlines()[-1]
            raise HardwareError(
                f"process {error.error_index} failed: {cause}", fix="check that the backend works here"
            ) from error
        finally:
            for process in context.processes:
                process.kill()
                process.join()
        return json.loads(Path(folder, "measured.json").read_text())


def is_joined() -> bool:
    """Return whether torchrun, or what sets the same variables, has started the processes, on one machine or many."""
    return int(os.environ.get("WORLD_SIZE", 1)) > 1 and "RANK" in os.environ


def joined(backend: str, world: int | None = None, quick: bool = False) -> dict:
    """Return what is measured by the processes that torchrun started, of which this is one. Raise HardwareError if
    there are not `world` of them, where that is given, or if machines are not alike."""
    rank, started = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world not in (None, started):
        raise HardwareError(f"torchrun started {started} processes, not {world}", fix="leave out --world")
    return measure.measured(rank, int(os.environ.get("LOCAL_RANK", rank)), started, backend, quick, "env://")
