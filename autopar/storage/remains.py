"""A checkpoint out of what the ranks that remain hold of a run, when others are lost.

Behind each step a rank notes what a later forward changes though no step follows: buffers, random numbers, the place
in the data. When a rank is lost no group of processes works any more, so each of the others leaves its parts of
parameters, buffers and the optimizer's state in a folder of its own, without a word to the others, and one process
puts them together. They are whole where the lost parts have copies: what ranks of data parallelism hold alike does,
what ZeRO shards over them does not.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import CheckpointError
from ..ir.layout import local_ranges
from . import generators, optimizer_state
from .checkpoint_folder import Place
from .durable import Digest, disk_errors, write_file
from .gather import copy_into
from .model_folder import local, tensors_of, write_config
from .opened import MODEL, OPTIMIZER, RNG, STATE, rng_name
from .plain import canonical, encode
from .shards import file_names
from .tensor_file import Form, Ranges, TensorFile, TensorFileWriter, in_order
from .weights import STEM, persistent_buffers

PARTS, NOTES, CONFIG = "parts.safetensors", "notes.json", "config"


@dataclass(frozen=True)
class Noted:
    """Keeps what a rank notes behind a step, besides parameters and the optimizer's state, which only steps change."""

    step: int
    values: dict[str, object]  # of a checkpoint's state.json
    buffers: Mapping[str, Tensor]
    generators: Mapping[str, Tensor]
    run: str | None = None


def noted(model: nn.Module, step: int, data: object, scaler, run: str | None) -> Noted:
    """Return what is to be noted of a compiled model behind `step`. `data`, `scaler`: as in save_checkpoint."""
    random = getattr(model, "random", None)
    values = {
        "data": encode(data, "data"), "scheduler": None, "scaler": encode(scaler.state_dict(), "scaler"),
        "dropout": None if random is None else {"seed": int(random.seed), "offset": int(random.offset)},
    }  # fmt: skip
    buffers = {name: local(buffer).clone() for name, buffer in persistent_buffers(model)}
    return Noted(step, values, buffers, generators.states(), run)


def leave(folder: Path, model: Any, optimizer: torch.optim.Optimizer, noted: Noted) -> None:
    """Write what this rank holds into a folder of its own in `folder`. Raises CheckpointError if it cannot be written,
    or the optimizer has state that only all ranks together can give."""
    mine, stage = folder / f"rank-{dist.get_rank():05d}", model.stage_mesh
    of_optimizer, plain = optimizer_state.describe(model, optimizer)
    if optimizer_state.is_collective(plain):
        raise CheckpointError(f"{type(optimizer).__name__} has state that no rank alone can give")
    held = {f"{MODEL}/{name}": one for name, one in tensors_of(model, adapters=True).items()}
    held |= {f"{OPTIMIZER}/{name}": one for name, one in of_optimizer.items()}
    parts = {f"{RNG}/{name}": state for name, state in noted.generators.items()}
    for key, one in held.items():
        part = noted.buffers.get(key.removeprefix(f"{MODEL}/"))
        if part is None and one.part is not None:
            part = one.part()
        if part is not None:
            parts[key] = part
    notes = {
        "step": noted.step, "values": noted.values, "optimizer": plain, "run": noted.run,
        "elsewhere": [*model.elsewhere],
        "tensors": {
            key: [one.form.shape, local_ranges(one.form.shape, one.layout, stage.mesh, stage.coordinate)]
            for key, one in held.items()
        },
    }  # fmt: skip
    with disk_errors(mine):
        (mine / CONFIG).mkdir(parents=True)
        write_config(model, mine / CONFIG)
        writer = TensorFileWriter(mine / PARTS, _forms(parts))
        for key in in_order(writer.forms):
            writer.append(parts[key])
        writer.close()
        write_file(mine / "unfinished", canonical(notes))
        os.replace(mine / "unfinished", mine / NOTES)


def put_together(folder: Path, root: Path, keep: int | None = None) -> Path:
    """Make the newest checkpoint under `root` of what ranks have left in `folder`, and return its path; `keep` as in
    save_checkpoint. Raises CheckpointError if they stood at different steps, or a part of a tensor is with none."""
    with _left_in(folder) as ranks:
        steps = sorted({rank.notes["step"] for rank in ranks})
        if len(steps) != 1:
            stand = f"the ranks that remain stand behind steps {' and '.join(map(str, steps))}"
            raise CheckpointError(stand if steps else "no rank has left what it holds")
        places = _places(ranks)
        place = Place(root, steps[0])
        bytes_ = sum(math.prod(shape) * form.dtype.itemsize for shape, form, _ in places.values())
        with disk_errors(root):
            root.mkdir(parents=True, exist_ok=True)
        place.begin(bytes_, MODEL)
        try:
            files = _write(ranks, places, place.unfinished)
            run = next((rank.notes["run"] for rank in ranks if rank.notes["run"]), uuid.uuid4().hex[:8])
            place.commit(files, run, keep)
        except BaseException:
            place.remove_unfinished()
            raise
    return place.final


@dataclass(frozen=True)
class _Left:
    """Says where one rank has left its parts, and what of them."""

    folder: Path
    notes: dict
    file: TensorFile


@contextmanager
def _left_in(folder: Path) -> Iterator[list[_Left]]:
    """Yield what ranks have left in a folder, in their order; what one has not finished is left out."""
    found = sorted(path.parent for path in folder.glob(f"rank-*/{NOTES}"))
    ranks = [_Left(mine, json.loads((mine / NOTES).read_text()), TensorFile(mine / PARTS)) for mine in found]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.file.close()


Parts = dict[tuple, _Left]  # by the ranges that a rank has of a tensor, one rank of those that have them


def _places(ranks: list[_Left]) -> dict[str, tuple[list[int], Form, Parts]]:
    """Return of each tensor its shape, the form of a part and who has which. Raises CheckpointError if some is lost."""
    found: dict[str, tuple[list[int], Form, Parts]] = {}
    for rank in ranks:
        for key, (shape, ranges) in rank.notes["tensors"].items():
            parts = found.setdefault(key, (shape, rank.file.forms[key], {}))[2]
            parts.setdefault(tuple(tuple(map(tuple, dim)) for dim in ranges), rank)
    for key, (shape, _, parts) in found.items():
        if sum(_elements(ranges) for ranges in parts) != math.prod(shape):
            raise CheckpointError(f"parts of {key.partition('/')[2]} were with lost ranks alone")
    for name in sorted({name for rank in ranks for name in rank.notes["elsewhere"]}):
        if f"{MODEL}/{name}" not in found:
            raise CheckpointError(f"{name} was with lost ranks alone")
    return found


def _elements(ranges: Ranges) -> int:
    return math.prod(sum(stop - start for start, stop in dim) for dim in ranges)


def _write(ranks: list[_Left], places: Mapping[str, tuple], folder: Path) -> dict[str, Digest]:
    """Write the files of a checkpoint and return their digests."""
    files = {f"{MODEL}/{name}": digest for name, digest in _copied(ranks[0].folder / CONFIG, folder / MODEL).items()}
    for stem, name in ((MODEL, f"{MODEL}/{file_names(STEM, 1)[0]}"), (OPTIMIZER, file_names(OPTIMIZER, 1)[0])):
        keys = [key for key in places if key.startswith(f"{stem}/")]
        forms = {key.partition("/")[2]: Form(tuple(places[key][0]), places[key][1].dtype) for key in keys}
        writer = TensorFileWriter(folder / name, forms)
        for key in in_order(forms):
            writer.append(_whole(f"{stem}/{key}", *places[f"{stem}/{key}"]))
        files[name] = writer.close()
    for i, rank in enumerate(ranks):
        states = {key.partition("/")[2]: rank.file.read(key) for key in rank.file.forms if key.startswith(f"{RNG}/")}
        writer = TensorFileWriter(folder / rng_name(i), _forms(states))
        for key in in_order(writer.forms):
            writer.append(states[key])
        files[rng_name(i)] = writer.close()
    return files | {STATE: write_file(folder / STATE, canonical(_state(ranks)))}


def _state(ranks: list[_Left]) -> dict:
    """Return a checkpoint's state.json."""
    values = ranks[0].notes["values"]
    drawn = [rank.notes["values"]["dropout"] for rank in ranks if rank.notes["values"]["dropout"]]
    return values | {
        "step": ranks[0].notes["step"], "data": [values["data"]], "ranks": len(ranks),
        "dropout": max(drawn, key=lambda random: random["offset"], default=None),
        "optimizer": optimizer_state.together([rank.notes["optimizer"] for rank in ranks]),
    }  # fmt: skip


def _whole(key: str, shape: list[int], form: Form, parts: Parts) -> Tensor:
    whole = torch.empty(shape, dtype=form.dtype)
    for ranges, rank in parts.items():
        copy_into(whole, rank.file.read(key), ranges)
    return whole


def _copied(source: Path, folder: Path) -> dict[str, Digest]:
    """Copy files into a folder and return their digests."""
    for path in source.iterdir():
        shutil.copy(path, folder / path.name)
    return {path.name: write_file(path, path.read_bytes()) for path in folder.iterdir()}


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, Form]:
    return {name: Form(tuple(x.shape), x.dtype) for name, x in tensors.items()}
