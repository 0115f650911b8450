"""Checkpoints: all that a training run needs to go on as if it had not stopped, on the same mesh or on any other.

    root/step-00000040/model/        a Hugging Face folder: safetensors shards, index, config.json
                       optimizer-*   safetensors: state tensors, whole, as the model's
                       rng-*         safetensors: each rank's generators, of torch, Python and numpy
                       state.json    step, data position, scheduler, dropout, the optimizer's plain values
                       manifest.json, COMMIT

Everything is whole tensors and JSON, nothing is pickled, and no mesh or plan is part of it: every rank reads the slices
that it needs. A save writes into a hidden folder, which takes its name when all ranks' files are on the disk; COMMIT
comes last.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from ..errors import CheckpointError, InputError
from ..processes import agree, process_groups, watch
from . import generators, optimizer_state, pending
from .checkpoint_folder import Place, check_shared, newest_whole
from .durable import Digest, disk_errors, write_file
from .folder_lock import FolderLock
from .gather import Held, of_all_stages
from .manifest import complete
from .model_folder import tensors_of, write_model
from .opened import MODEL, OPTIMIZER, STATE, Opened, rng_name
from .plain import canonical, encode
from .shards import Written, write_shards
from .tensor_file import FileForLater, Form, TensorFileWriter, in_order

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
    data=None, scaler=None, keep: int | None = None, wait: bool = True,
) -> Path:  # fmt: skip
    """Save a compiled model and what trains it as `root/step-STEP`, and return that path. All ranks call it together.

    `scheduler`, `data`: objects with state_dict(), or plain values (a data position may differ between ranks);
    `scaler`: a torch.amp.GradScaler, without which float16 starts again at its first scale. `keep`: afterwards remove
    all of this run's checkpoints but the last so many that were saved, this one among them, whatever their steps; the
    disk needs room for one more. A run is what one compiled model saves, before and after it loads one of its
    checkpoints; those of other runs in the folder stay, but for one of the same step, which this one replaces. A kill
    at any point leaves the earlier checkpoints, and this one or nothing.

    `wait`: False returns when the tensors are copied to the host, about their bytes by the number of ranks on each, and
    writes them meanwhile; the next save or load, `finish_checkpoint` or the end of the program waits for that, and
    raises what went wrong. Raises CheckpointError if something cannot be saved, such as for want of room, or if ranks
    do not see one folder."""
    _check_model(model)
    agree.everywhere(lambda: _check_numbers(step, keep))
    given = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    words = [f"step={step}", f"keep={keep}", *(name for name, value in given.items() if value is not None)]
    agree.check_calls(f"save_checkpoint({', '.join(words)})", fix="save the same on every rank")
    agree.check_alike()  # else what is saved may be of another step on some ranks
    place = Place(Path(root).expanduser(), step)
    pending.finish()
    check_shared(place.root)
    tensors: dict[str, Held] = {}
    plain = None
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
    bytes_ = sum(_bytes_of(held, model) for held in (tensors_of(model, adapters=True), tensors))

    def commit(files: Mapping[str, Digest]) -> None:
        with disk_errors(place.final):
            digests = dict(files) | {STATE: write_file(place.unfinished / STATE, canonical(state))}
        place.commit(digests, _runs.setdefault(model, uuid.uuid4().hex[:8]), keep)

    lock = FolderLock(place.root)  # rank 0 takes it for all

    def begin() -> None:
        with disk_errors(place.root):
            lock.take(process_groups.timeout_seconds())
        place.begin(bytes_, MODEL)

    open_file, folder = TensorFileWriter if wait else FileForLater, place.unfinished
    try:
        agree.from_rank_zero(begin)
        # one after the other: a rank that fails in one of them must not leave the others waiting in the next
        parts = [
            _inside(MODEL, agree.everywhere(lambda: write_model(model, folder / MODEL, open_file=open_file))),
            agree.everywhere(lambda: write_shards(tensors, folder, OPTIMIZER, model.stage_mesh, open_file=open_file)),
            agree.everywhere(lambda: _write_generators(folder)),
        ]
        written = {name: file for part in parts for name, file in part.items()}
        if wait:
            everyone = agree.from_all(lambda: written)
            agree.from_rank_zero(lambda: commit({name: file for part in everyone for name, file in part.items()}))
        else:
            pending.begin(written, place, commit, lock)
    except BaseException as error:
        if dist.get_rank() == 0 and lock.is_held and isinstance(error, Exception):
            place.remove_unfinished()  # it may have filled the disk
        lock.release()
        raise
    if wait:
        lock.release()
    return place.final


@watch.asking("load_checkpoint")
def load_checkpoint(
    folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, scheduler=None, data=None,
    scaler=None,
) -> Checkpoint:  # fmt: skip
    """Load a checkpoint, or the one under a root that was saved last, into a model compiled for any mesh and its
    optimizer.

    `scheduler`, `data`, `scaler`: objects with load_state_dict(). Also restores the generators of torch, Python and
    numpy (a rank beyond those that saved takes rank 0's) and the dropout state. Every file is checked before anything
    is changed; under a root a damaged checkpoint is passed over, with a warning. Raises, on every rank: CheckpointError
    if there is none, CheckpointCorrupt if all are damaged, CheckpointMismatch for one of another model or optimizer.
    """
    _check_model(model)
    pending.finish()
    path, manifest = newest_whole(Path(folder).expanduser())
    rank, ranks = dist.get_rank(), dist.get_world_size()
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
    _runs[model] = manifest.run
    return Checkpoint(path, opened.step, position, manifest.run, manifest.saved)


@watch.asking("finish_checkpoint")
def finish_checkpoint() -> None:
    """Wait for a checkpoint that `save_checkpoint(..., wait=False)` began, if there is one. All ranks call it together.
    Raises CheckpointError if it could not be written."""
    pending.finish()


def run_of(model: nn.Module) -> str | None:
    """Return the name of the run that a compiled model is of, if this rank knows it: rank 0 does, and all after a
    load."""
    return _runs.get(model)


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


def _inside(folder: str, written: Mapping[str, Written]) -> dict[str, Written]:
    return {f"{folder}/{name}": file for name, file in written.items()}


def _bytes_of(held: dict[str, Held], model: nn.Module) -> int:
    """Return the bytes of the tensors that the stages hold together. All ranks call this."""
    return sum(one.form.bytes_ for one in of_all_stages(held, model.stage_mesh).values())


def _write_generators(folder: Path) -> dict[str, Written]:
    """Write the states of this rank's random generators."""
    states, path = generators.states(), folder / rng_name(dist.get_rank())
    forms = {name: Form(tuple(value.shape), value.dtype) for name, value in states.items()}
    with disk_errors(path):
        writer = TensorFileWriter(path, forms)
        for name in in_order(forms):
            writer.append(states[name])
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
