"""Tensors that ranks hold parts of, as safetensors files of whole tensors: one file a rank, written at the same time.

A whole tensor lies in one file, so that any reader of such files can use them whatever the mesh was. Its owner gathers it, writes
it and lets it go before the next one: no rank ever holds more than one whole tensor besides its own parts. Owners are chosen such
that files are about equally long.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from ..errors import CheckpointError
from ..layout import Layout
from ..mesh import Mesh
from .durable import Digest, disk_errors, write_file
from .gather import gather_to
from .tensor_file import NAMES, Form, TensorFileWriter, in_order
from .weights import index_name, single_name


@dataclass(frozen=True)
class Held:
    """A tensor of which every rank holds the part that `layout` says; `part()` gives it. All ranks ask for it together."""

    form: Form
    layout: Layout
    part: Callable[[], Tensor]


def file_names(stem: str, count: int) -> list[str]:
    """As Hugging Face names the shards of a model."""
    if count == 1:
        return [single_name(stem)]
    return [f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def owners_of(forms: Mapping[str, Form], ranks: int) -> dict[str, int]:
    """The rank that writes each tensor: largest tensors first, to whoever has least."""
    load, owners = [0] * ranks, {}
    for name in sorted(forms, key=lambda name: (-forms[name].bytes_, name)):
        owners[name] = load.index(min(load))
        load[owners[name]] += max(1, forms[name].bytes_)
    return owners


def write_shards(held: Mapping[str, Held], folder: Path, stem: str, mesh: Mesh, files: int | None = None) -> dict[str, Digest]:
    """Write this rank's file, if it has one, and take part in the gathering of all; rank 0 writes the index, if there are several.
    Returns the digests of this rank's files by name. `files`: how many there are at most, of the first ranks (None: one a rank).

    Raises CheckpointError if the file cannot be written or a dtype cannot be stored. Until all is gathered a failure waits, lest
    other ranks wait for this one; they have to be told afterwards."""
    rank, forms = dist.get_rank(), {name: h.form for name, h in held.items()}
    if strange := [name for name in forms if forms[name].dtype not in NAMES]:
        raise CheckpointError(f"{strange[0]} is {forms[strange[0]].dtype}, which safetensors cannot store")
    files = file_names(stem, max(1, min(mesh.devices, len(forms), files or mesh.devices)))
    index = {name: files[owner] for name, owner in owners_of(forms, len(files)).items()}
    mine = files[rank] if rank < len(files) else None
    writer = failure = None
    for name in in_order(forms):
        h = held[name]
        whole = gather_to(files.index(index[name]), h.part(), h.form.shape, h.layout, mesh)
        if index[name] != mine or failure is not None:
            continue
        try:
            with disk_errors(folder / mine):
                writer = writer or TensorFileWriter(folder / mine, {n: forms[n] for n in forms if index[n] == mine})
                writer.append(whole)
        except CheckpointError as error:
            failure = error
    if failure is not None:
        raise failure
    with disk_errors(folder / stem):
        if mine is not None and writer is None:  # there is no tensor at all
            writer = TensorFileWriter(folder / mine, {})
        written = {mine: writer.close()} if mine is not None else {}
        if rank == 0 and len(files) > 1:
            total = sum(form.bytes_ for form in forms.values())
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2, sort_keys=True)
            written[index_name(stem)] = write_file(folder / index_name(stem), text.encode())
    return written
