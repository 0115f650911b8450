"""Plans of meshes that a run may go on with if processes are lost, made before one of them is needed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from .. import models
from .._torch import own_progress_lock
from ..api import entry
from ..errors import AutoparError
from ..hardware import profile
from ..hardware.cores import on_cores
from ..ir.mesh import Mesh
from ..planner.options import execution_on
from ..planner.spmd.plan_options import IN_DOUBT
from ..plans.pipeline import axis_of
from . import common, train_rank
from .elastic import template
from .own_processes import start_method
from .stop_signals import end_with_parent

LOWEST_PRIORITY = 19


@contextmanager
def planning(settings: dict, meshes: Sequence[Mesh], folder: Path) -> Iterator[None]:
    """Let a process of the lowest priority plan inside what the settings of a run ask for, for each of some meshes,
    into a folder."""
    missing = [str(mesh) for mesh in meshes if template(folder, mesh) is None]
    context = multiprocessing.get_context(start_method())
    process = context.Process(target=_plan, args=(settings, missing, folder), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _plan(settings: dict, meshes: Sequence[str], folder: Path) -> None:
    end_with_parent()
    os.nice(LOWEST_PRIORITY)
    torch.set_num_threads(1)
    own_progress_lock()
    common.quiet()
    warnings.simplefilter("ignore")  # the run has said it
    source, inputs = models.build(settings["model"], device="meta", **train_rank.sizes(settings))
    asked = train_rank.asked(settings)
    if settings["device"] == "cpu" and asked["precision"] == "auto":
        asked["precision"] = "fp32"  # as on a DeviceMesh of processors
    asked["execution"] = execution_on(settings["device"], asked["execution"], asked["offload"])
    known, cores = profile.load(asked["hardware"]), os.cpu_count() or 1
    for mesh in meshes:
        asked["hardware"] = on_cores(known, cores / Mesh.parse(mesh).devices)
        in_doubt = IN_DOUBT if asked["strategy"] is None and axis_of(Mesh.parse(mesh)) is None else False
        with contextlib.suppress(AutoparError):  # such as of memory: the run says it if it comes to that mesh
            plan = entry.plan(source, mesh, inputs, baselines=in_doubt, fixes=False, **asked)
            plan.save(folder / "unfinished")
            os.replace(folder / "unfinished", folder / f"{mesh}.json")
