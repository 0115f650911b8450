"""Checkpoints: all that a training run needs to go on as if it had not stopped, on the same mesh or on any other.

    root/step-00000040/model/        a Hugging Face folder: safetensors shards, index, config.json
                       optimizer-*   safetensors: state tensors, whole, as the model's
                       rng-*         safetensors: each rank's torch generators
                       state.json    step, data position, scheduler, dropout, the optimizer's plain values
                       manifest.json, COMMIT

Everything is whole tensors and JSON, nothing is pickled, and no mesh or plan is part of it: every rank reads the slices
that it needs. A save writes into a hidden folder, which takes its name when all ranks' files are on the disk; COMMIT
comes last.
"""

from __future__ import annotations

import math
import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from ..errors import CheckpointError, InputError
from ..processes import agree, watch
from . import optimizer_state
from .durable import Digest, disk_errors, sync_folder, write_file
from .manifest import COMMIT, REPLACED, Manifest, complete, folder_name, incomplete, is_checkpoint, number_of
from .model_folder import make_folder, write_model
from .opened import MODEL, OPTIMIZER, STATE, Opened, rng_name
from .plain import canonical, encode
from .shards import write_shards
from .tensor_file import Form, TensorFileWriter

_runs: WeakKeyDictionary[nn.Module, str] = (
    WeakKeyDictionary()
)  # the name of the run that a model is of, known on rank 0


@dataclass(frozen=True)
class Checkpoint:
    """The rest of a loaded checkpoint. `data`: what `save_checkpoint` was given as data on this rank; where ranks gave
    different data and there is another number of ranks now, the list of it all. `run`: the name of the run that saved
    it, `saved`: when, in UTC."""

    path: Path
    step: int
    data: Any
    run: str = ""
    saved: str = ""


@watch.asking("save_checkpoint")
def save_checkpoint(
    root: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, step: int, scheduler=None,
    data=None, scaler=None, keep: int | None = None,
) -> Path:  # fmt: skip
    """Save a compiled model and what trains it as `root/step-STEP`, and return that path. All ranks call it together.

    `scheduler`, `data`: objects with state_dict(), or plain values (a data position may differ between ranks);
    `scaler`: a torch.amp.GradScaler, without which float16 starts again at its first scale. `keep`: afterwards remove
    all of this run's checkpoints but the last so many that were saved, this one among them, whatever their steps; the
    disk needs room for one more. A run is what one compiled model saves, before and after it loads one of its
    checkpoints; those of other runs in the folder stay, but for one of the same step, which this one replaces. A kill
    at any point leaves the earlier checkpoints, and this one or nothing. Raises CheckpointError if something cannot be
    saved."""
    _check_model(model)
    agree.everywhere(lambda: _check_numbers(step, keep))
    given = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    words = [f"step={step}", f"keep={keep}", *(name for name, value in given.items() if value is not None)]
    agree.check_calls(f"save_checkpoint({', '.join(words)})", fix="save the same on every rank")
    root = Path(root).expanduser()
    final = root / folder_name(step)
    unfinished = root / f".{final.name}.unfinished"
    tensors, plain = {}, None
    if optimizer is not None:
        tensors, plain = agree.everywhere(lambda: optimizer_state.describe(model, optimizer))
        plain = agree.everywhere(lambda: optimizer_state.of_all_stages(plain, model.stage_mesh))
    positions = agree.from_all(lambda: encode(_state_of(data), "data"))
    state = {
        "step": step, "data": positions[:1] if all(p == positions[0] for p in positions) else positions,
        "ranks": len(positions), "scheduler": agree.everywhere(lambda: encode(_state_of(scheduler), "scheduler")),
        "dropout": _dropout_of(model), "optimizer": plain,
        "scaler": agree.everywhere(lambda: encode(_state_of(scaler), "scaler")),
    }  # fmt: skip

    def begin() -> None:
        with disk_errors(root):
            _remove_unfinished(root)
        make_folder(unfinished)
        make_folder(unfinished / MODEL)

    def commit() -> None:
        files = {path: digest for part in written for path, digest in part.items()}
        with disk_errors(final):
            files[STATE] = write_file(unfinished / STATE, canonical(state))
            number = 1 + max((n for n in map(number_of, complete(root)) if n < math.inf), default=0)
            run, now = _runs.setdefault(model, uuid.uuid4().hex[:8]), datetime.now(UTC).isoformat(" ", "seconds")
            committed = Manifest(step, files, run, number, now).write(unfinished)
            _put_in_place(unfinished, final)
            write_file(final / COMMIT, committed.encode())
            _clean(root, final, run, keep)

    agree.from_rank_zero(begin)
    try:
        # one after the other: a rank that fails in one of them must not leave the others waiting in the next
        written = [
            *agree.from_all(lambda: _inside(MODEL, write_model(model, unfinished / MODEL))),
            *agree.from_all(lambda: write_shards(tensors, unfinished, OPTIMIZER, model.stage_mesh)),
            *agree.from_all(lambda: _write_generators(unfinished)),
        ]
        agree.from_rank_zero(commit)
    except Exception:
        if dist.get_rank() == 0:
            _remove_unfinished(root)  # it may have filled the disk
        raise
    return final


@watch.asking("load_checkpoint")
def load_checkpoint(
    folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, scheduler=None, data=None,
    scaler=None,
) -> Checkpoint:  # fmt: skip
    """Load a checkpoint, or the one under a root that was saved last, into a model compiled for any mesh and its
    optimizer.

    `scheduler`, `data`, `scaler`: objects with load_state_dict(). Also restores torch's generators (a rank beyond those
    that saved takes rank 0's) and the dropout state. Every file is checked before anything is changed. Raises, on every
    rank: CheckpointError if there is none, CheckpointCorrupt for a damaged one, CheckpointMismatch for one of another
    model or optimizer."""
    _check_model(model)
    path, run, saved = agree.from_rank_zero(lambda: _find(Path(folder).expanduser()))
    path, rank, ranks = Path(path), dist.get_rank(), dist.get_world_size()
    agree.everywhere(lambda: Manifest.read(path).check(path, lambda i: i % ranks == rank))
    needs_scale = scaler is not None and bool(scaler.state_dict())  # one that is not enabled has no state
    opened = agree.everywhere(
        lambda: Opened(path, model, optimizer, scheduler is not None, data is not None, needs_scale)
    )
    agree.everywhere(opened.restore)
    position = (
        opened.positions if len(opened.positions) not in (1, ranks) else opened.positions[rank % len(opened.positions)]
    )
    scale = scaler if needs_scale else None
    for target, value in ((scheduler, opened.scheduler), (data, position), (scale, opened.scaler)):
        if target is not None:
            target.load_state_dict(value)
    _runs[model] = run
    return Checkpoint(path, opened.step, position, run, saved)


def latest_checkpoint(root: str | Path) -> Path | None:
    """Return the complete checkpoint under `root` that was saved last, whatever its step; None if there is none."""
    return next(iter(complete(Path(root).expanduser())), None)


def _check_numbers(step: object, keep: object) -> None:
    if type(step) is not int or step < 0:
        raise CheckpointError(f"step is {step!r}", fix="give the number of steps taken")
    if keep is not None and (type(keep) is not int or keep < 1):
        raise CheckpointError(
            f"keep is {keep!r}", fix="give the number of checkpoints to keep, 1 or more, or None for all"
        )


def _check_model(model: nn.Module) -> None:
    if not hasattr(model, "layouts"):
        raise InputError(
            f"checkpoints are of compiled models, not of a {type(model).__name__}",
            fix="pass what autopar.compile returned, compiled with example_inputs",
        )
    if model._adapters is not None:
        model._adapters.refuse_merged("save or load checkpoints")


# saving
# -------------------------------------------------------------------------------------------------------------------


def _inside(folder: str, written: Mapping[str, Digest]) -> dict[str, Digest]:
    return {f"{folder}/{name}": digest for name, digest in written.items()}


def _write_generators(folder: Path) -> dict[str, Digest]:
    """Write the states of torch's generators on this rank."""
    states = {"cpu": torch.get_rng_state()} | (
        {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {}
    )
    path = folder / rng_name(dist.get_rank())
    with disk_errors(path):
        writer = TensorFileWriter(path, {name: Form(tuple(value.shape), value.dtype) for name, value in states.items()})
        for value in states.values():
            writer.append(value)
        return {path.name: writer.close()}


def _state_of(value):
    return value.state_dict() if hasattr(value, "state_dict") else value


def _dropout_of(model: nn.Module) -> dict | None:
    """Return where the random numbers stand; under a pipeline those of the stages that draw."""
    random = getattr(model, "random", None)
    offsets = model.stage_mesh.from_all_pp_ranks(
        None if random is None else int(random.offset), "where random numbers stand"
    )
    return None if random is None else {"seed": int(random.seed), "offset": max(offsets)}


def _put_in_place(unfinished: Path, final: Path) -> None:
    """Give a finished folder its name; a checkpoint that has it keeps another one, complete, until it is cleaned
    away."""
    root = final.parent
    if (final / COMMIT).is_file():
        shutil.rmtree(replaced := final.with_name(final.name + REPLACED), ignore_errors=True)
        os.rename(final, replaced)
    else:
        shutil.rmtree(final, ignore_errors=True)
    for folder in (unfinished / MODEL, unfinished):
        sync_folder(folder)
    os.rename(unfinished, final)
    sync_folder(root)


def _clean(root: Path, saved: Path, run: str, keep: int | None) -> None:
    """Remove what saves that did not end have left, what was replaced, and all of this run but the last `keep` that
    were saved, of which `saved` is one."""
    _remove_unfinished(root)
    newest = complete(root)
    old = [path for path in newest if path.name.endswith(REPLACED)]
    if keep is not None:
        mine = [path for path in newest if path != saved and path not in old and _is_of(path, run)]
        old += mine[keep - 1 :]
    for path in old:
        (path / COMMIT).unlink()  # first of all: what is half removed is not complete
        sync_folder(path)
        shutil.rmtree(path, ignore_errors=True)


def _remove_unfinished(root: Path) -> None:
    for path in (*root.glob(".step-*.unfinished"), *incomplete(root)):
        shutil.rmtree(path, ignore_errors=True)


def _is_of(path: Path, run: str) -> bool:
    """Return whether a run saved this checkpoint; one that cannot be read is nobody's."""
    try:
        return Manifest.read(path).run == run
    except CheckpointError:
        return False


# loading
# ------------------------------------------------------------------------------------------------------------------


def _find(folder: Path) -> tuple[str, str, str]:
    """Return (path, run, when it was saved) of the checkpoint `folder`, or of the one under it that was saved last.
    Raises CheckpointError if there is none, CheckpointCorrupt if it has files but its own."""
    if not is_checkpoint(folder) and not (folder / COMMIT).exists():
        found = latest_checkpoint(folder)
        if found is None:
            raise CheckpointError(
                f"there is no complete checkpoint in {folder}", fix="see the path; save_checkpoint makes one"
            )
        folder = found
    manifest = Manifest.read(folder)
    manifest.refuse_unlisted(folder)
    return str(folder), manifest.run, manifest.saved
