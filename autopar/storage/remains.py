"""A checkpoint out of what the ranks that remain hold of a run, when others are lost.

When a rank is lost no group of processes works any more, so each of the others leaves what it holds in a folder of its
own, without a word to the others: its parts behind the last step (held_parts.py), and copies that ranks have of each
other's (copies.py). One process puts them together. They are whole where the lost parts have copies: what ranks of data
parallelism hold alike does by itself, what ZeRO shards over them in a neighbour's memory.
"""

from __future__ import annotations

import json
import math
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..processes import process_groups
from . import optimizer_state
from .checkpoint_folder import Place
from .durable import Digest, disk_errors, write_file
from .folder_lock import FolderLock
from .gather import copy_into
from .held_parts import CONFIG, NOTES, PARTS
from .opened import MODEL, OPTIMIZER, RNG, STATE, rng_name
from .plain import canonical
from .shards import file_names
from .tensor_file import Form, Ranges, TensorFile, TensorFileWriter, in_order
from .weights import STEM


def put_together(folder: Path, root: Path, keep: int | None = None, newer_than: int = -1) -> Path:
    """Make the newest checkpoint under `root` of what ranks have left in `folder`, of the last step of which they hold
    all, and return its path; `keep` as in save_checkpoint. Raises CheckpointError if that is nowhere, or not behind the
    step `newer_than`."""
    why = []
    for step in sorted((int(path.name.partition("-")[2]) for path in folder.glob("step-*")), reverse=True):
        if step <= newer_than:
            why.append(f"what else remains is of step {step}")
            break
        with _left_in(folder / f"step-{step:08d}") as ranks:
            try:
                return _checkpoint_of(ranks, step, root, keep)
            except _Lost as lost:
                why.append(f"step {step}: {lost.message}")
    raise CheckpointError("; ".join(why) or "no rank has left what it holds")


class _Lost(CheckpointError):
    """Something is with no rank that remains."""


def _checkpoint_of(ranks: list[_Left], step: int, root: Path, keep: int | None) -> Path:
    """Make a checkpoint of what ranks have left of a step. Raises _Lost if that is not whole."""
    places = _places(ranks)
    place = Place(root, step)
    bytes_ = sum(math.prod(shape) * form.dtype.itemsize for shape, form, _ in places.values())
    with disk_errors(root):
        root.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(root)
    lock.take(process_groups.timeout_seconds())
    try:
        place.begin(bytes_, MODEL)
        files = _write(ranks, places, place.unfinished)
        run = next((rank.notes["run"] for rank in ranks if rank.notes["run"]), uuid.uuid4().hex[:8])
        place.commit(files, run, keep)
    except BaseException:
        place.remove_unfinished()
        raise
    finally:
        lock.release()
    return place.final


@dataclass(frozen=True)
class _Left:
    """Says where one rank has left its parts, and what of them."""

    folder: Path
    notes: dict
    file: TensorFile


@contextmanager
def _left_in(folder: Path) -> Iterator[list[_Left]]:
    """Yield what there is of ranks in a folder, in their order, left by themselves or by one that had a copy; what one
    has not finished is left out."""
    places = sorted((path.parent for path in folder.glob(f"rank-*/{NOTES}")), reverse=True)
    found = {place.name[: len("rank-00000")]: place for place in places}  # the shortest name last
    ranks = [_Left(p, json.loads((p / NOTES).read_text()), TensorFile(p / PARTS)) for _, p in sorted(found.items())]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.file.close()


Parts = dict[tuple, _Left]  # by the ranges that a rank has of a tensor, one rank of those that have them


def _places(ranks: list[_Left]) -> dict[str, tuple[list[int], Form, Parts]]:
    """Return of each tensor its shape, the form of a part and who has which. Raises _Lost if some is with nobody."""
    if not ranks:
        raise _Lost("no rank has left what it holds")
    found: dict[str, tuple[list[int], Form, Parts]] = {}
    for rank in ranks:
        for key, (shape, ranges) in rank.notes["tensors"].items():
            parts = found.setdefault(key, (shape, rank.file.forms[key], {}))[2]
            parts.setdefault(tuple(tuple(map(tuple, dim)) for dim in ranges), rank)
    for key, (shape, _, parts) in found.items():
        if sum(_elements(ranges) for ranges in parts) != math.prod(shape):
            raise _Lost(f"parts of {key.partition('/')[2]} were with lost ranks alone")
    for name in sorted({name for rank in ranks for name in rank.notes["names"]} - {*found}):
        raise _Lost(f"{name.partition('/')[2]} was with lost ranks alone")
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
