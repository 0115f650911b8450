"""Tensors that ranks hold parts of, as safetensors files of whole tensors: one file a rank, written at the same time.

A whole tensor lies in one file, so that any reader of such files can use them whatever the mesh was. Its owner, a rank
that holds a part of it, gathers it, writes it and lets it go before the next one: no rank ever holds more than one
whole tensor besides its own parts. Owners are chosen such that files are about equally long.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist

from ..errors import CheckpointError
from ..processes.stage_mesh import StageMesh
from .durable import Digest, disk_errors, write_file
from .gather import Held, gather_to, of_all_stages
from .tensor_file import NAMES, FileForLater, Form, TensorFileWriter, in_order
from .weights import index_name, single_name

Written = Digest | FileForLater


def file_names(stem: str, count: int) -> list[str]:
    """Return the names of `count` files, as Hugging Face names the shards of a model."""
    if count == 1:
        return [single_name(stem)]
    return [f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def owners_of(
    forms: Mapping[str, Form], pp_ranks: Mapping[str, Sequence[int]], ranks: Sequence[Sequence[int]]
) -> dict[str, int]:
    """Return the rank that writes each tensor: largest tensors first, to the holder that has least, the first of them.
    `pp_ranks`: those that hold a tensor; `ranks`: by pipeline rank, the ranks of the world, in order."""
    queues, owners = [[(0, rank) for rank in of_stage] for of_stage in ranks], {}
    for name in sorted(forms, key=lambda name: (-forms[name].bytes_, name)):
        queue = min((queues[p] for p in pp_ranks[name]), key=lambda queue: queue[0])
        bytes_, owners[name] = queue[0]
        heapq.heapreplace(queue, (bytes_ + max(1, forms[name].bytes_), owners[name]))
    return owners


def write_shards(
    held: Mapping[str, Held],
    folder: Path,
    stem: str,
    stage: StageMesh,
    writer_rank: int | None = None,
    open_file: type[TensorFileWriter] | type[FileForLater] = TensorFileWriter,
) -> dict[str, Written]:
    """Write this rank's file, if it has one, and take part in the gathering of all; rank 0 writes the index, if there
    are several. `held`: what this rank's stage holds. Returns the digests of this rank's files by name, or the file
    where `open_file` keeps it for later. `writer_rank`: the one that writes all tensors, as one file (None: those that
    hold them).

    Raises CheckpointError if the file cannot be written or a dtype cannot be stored. Until all is gathered a failure
    waits, lest other ranks wait for this one; they have to be told afterwards."""
    held = of_all_stages(dict(held), stage)
    rank, forms = dist.get_rank(), {name: h.form for name, h in held.items()}
    if strange := [name for name in forms if forms[name].dtype not in NAMES]:
        raise CheckpointError(f"{strange[0]} is {forms[strange[0]].dtype}, which safetensors cannot store")
    if writer_rank is None:
        owners = owners_of(forms, {name: h.pp_ranks for name, h in held.items()}, stage.ranks)
    else:
        owners = dict.fromkeys(forms, writer_rank)
    writers = sorted({*owners.values()} or {writer_rank or 0})
    files = dict(zip(writers, file_names(stem, len(writers))))
    index, mine = {name: files[owner] for name, owner in owners.items()}, files.get(rank)
    writer = failure = None
    try:
        for name in in_order(forms):
            whole = gather_to(owners[name], held[name], stage)
            if rank != owners[name] or failure is not None:
                continue
            try:
                with disk_errors(folder / mine):
                    writer = writer or open_file(folder / mine, {n: forms[n] for n in forms if index[n] == mine})
                    writer.append(whole)
            except CheckpointError as error:
                failure = error
    except BaseException:  # another rank is gone
        if writer is not None:
            writer.abandon()
        raise
    if failure is not None:
        raise failure
    with disk_errors(folder / stem):
        if mine is not None and writer is None:  # there is no tensor at all
            writer = open_file(folder / mine, {})
        written: dict[str, Written] = {mine: writer.close()} if mine is not None else {}
        if rank == 0 and len(files) > 1:
            total = sum(form.bytes_ for form in forms.values())
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2, sort_keys=True)
            written[index_name(stem)] = write_file(folder / index_name(stem), text.encode())
    return written
