"""Training processes of which one fails, and what the others say of it.

outcome = run("kill", "dp=2,tp=2", plan, victim=3, after=0.1)
"""

from __future__ import annotations

import ast
import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import autopar
from autopar import Plan, models
from autopar.ir.mesh import Mesh
from autopar.processes.diagnosis import sentences
from autopar.processes.records import Record
from tests.helpers import gloo

MODEL = "mlp:hidden=16,layers=1"
FAULTS = ("kill", "exit", "raise", "stop", "sleep")
HANGS = ("stop", "sleep")
APART = ("clip", "save", "no_sync", "skip", "extra", "step", "evaluation", "no_grad")  # of one rank alone
WITHOUT_GRADIENTS = ("evaluation", "no_grad")  # calls that all ranks have to meet before
TIMEOUT_SECONDS = 3.0


@dataclass(frozen=True)
class Outcome:
    """`seconds`: from the fault to the end of the last survivor's process; `errors`: by survivor, (type, ranks named,
    step, text); `codes`: exit codes of survivors; `silent`: survivors that were still there at the end and had to be
    killed; `diagnosis`: what the ranks' records say together."""

    seconds: float
    errors: dict[int, tuple[str, tuple[int, ...], int, str]]
    codes: tuple[int, ...]
    silent: tuple[int, ...]
    diagnosis: list[str]

    def named_right(self, fault: str, victim: int) -> bool:
        """Return whether every survivor raised the right error about the right rank, with the step it was in."""
        kind = "CollectiveTimeout" if fault in HANGS else "RankFailure"
        return bool(self.errors) and all(e[:2] == (kind, (victim,)) and e[2] >= 1 for e in self.errors.values())


def inputs() -> tuple:
    return models.build(MODEL, batch=4, seq=2, device="cpu", seed=0)


def run(fault: str, mesh: str, plan: Plan, victim: int, after: float, seconds: float = 60,
        backend: str | None = None) -> Outcome:  # fmt: skip
    """Starts a process a device, waits until all train, `after` seconds later lets `victim` fail, and collects the
    others. `backend`: of torch.compile, if the graphs go through it."""
    world, context = Mesh.parse(mesh).devices, multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(gloo.PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=_main,
                args=(rank, world, folder, fault, rank == victim, mesh, plan, backend),
                daemon=True,
            )  # fmt: skip
            for rank in range(world)
        ]
        try:
            for process in processes:
                process.start()
            _wait(lambda: all(Path(folder, f"running-{r}").exists() for r in range(world)), 2 * seconds)
            time.sleep(after)
            start = time.monotonic()
            if fault in ("kill", "stop"):
                os.kill(processes[victim].pid, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
            Path(folder, "go").touch()
            survivors = [r for r in range(world) if r != victim]
            for rank in survivors:
                processes[rank].join(max(0.0, start + seconds - time.monotonic()))
            took = time.monotonic() - start
            silent = tuple(r for r in survivors if processes[r].is_alive())
            errors = {r: ast.literal_eval(text) for r in survivors if (text := _read(Path(folder, f"error-{r}")))}
            left = [Record.read(file) for file in sorted(Path(folder, "records").glob("*.json"))]
            codes = tuple(processes[r].exitcode for r in survivors if r not in silent)
            return Outcome(took, errors, codes, silent, sentences(left) if left else [])
        finally:
            for process in processes:
                process.kill()
                process.join()


def _read(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def _wait(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the processes did not begin to train")
        time.sleep(0.02)


def _main(rank: int, world: int, folder: str, fault: str, is_victim: bool, mesh: str, plan: Plan,
          backend: str | None) -> None:  # fmt: skip
    from torch.distributed.device_mesh import init_device_mesh

    from autopar.processes import process_groups

    os.environ["AUTOPAR_TIMEOUT_S"] = str(TIMEOUT_SECONDS)
    os.environ["AUTOPAR_RECORDS"] = f"{folder}/records"
    process_groups.STEPS = 0  # else a slow machine's first step would set the limit
    torch.set_num_threads(1)
    sys.stderr = open(os.devnull, "w")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    axes = Mesh.parse(mesh)
    model, batch = inputs()
    model = autopar.compile(model, init_device_mesh("cpu", axes.sizes, mesh_dim_names=axes.names), batch, plan=plan)
    if backend is not None:
        model.compile(backend=backend)
    optimizer, step = torch.optim.SGD(model.parameters(), lr=1e-3), 0
    if fault in WITHOUT_GRADIENTS:
        with torch.no_grad():
            model(**batch)
    fault = fault if is_victim else ""
    try:
        while True:
            step += 1
            if step == 4:
                Path(folder, f"running-{rank}").touch()
            if fault in ("exit", "raise", "sleep") and os.path.exists(f"{folder}/go"):
                if fault == "sleep":
                    time.sleep(600)
                if fault == "exit":
                    sys.exit(0)
                raise ValueError("a bad batch")
            if fault in APART and os.path.exists(f"{folder}/go"):
                fault = _apart(fault, model, optimizer, batch, folder)
                continue
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    except Exception as error:
        ranks = getattr(error, "ranks", None) or (getattr(error, "rank", None),)
        with contextlib.suppress(OSError):
            Path(folder, f"error-{rank}").write_text(
                repr((type(error).__name__, ranks, getattr(error, "step", 0), str(error)))
            )
        sys.excepthook(*sys.exc_info())  # as the interpreter does at the end of a program
        sys.exit(3)


def _apart(fault: str, model, optimizer: torch.optim.Optimizer, batch: dict, folder: str) -> str:
    """Do on this rank what the others do not, and return no fault: it goes on as they do."""
    if fault == "clip":
        model.clip_grad_norm_(1.0)
    elif fault == "save":
        autopar.save_checkpoint(folder, model, step=1)
    elif fault == "no_sync":
        with model.no_sync():
            model(**batch).loss.backward()
    elif fault == "extra":
        model(**batch)
    elif fault == "skip":
        model(**batch)
        optimizer.step()
    elif fault == "step":
        model(**batch).loss.backward()
        optimizer.zero_grad()
    elif fault in WITHOUT_GRADIENTS:
        with torch.no_grad():
            model(**batch)
        if fault == "no_grad":
            optimizer.step()
    return ""
