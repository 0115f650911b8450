"""A compiled model as a folder that Hugging Face's `from_pretrained` and `weights=` load: config.json, shards and their
index."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Collection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import _torch
from ..ir.layout import Layout
from ..processes import agree, watch
from .durable import Digest, disk_errors, sync_folder, write_file
from .gather import Held, gather_everywhere
from .shards import Written, write_shards
from .tensor_file import Form
from .weights import STEM, index_name, persistent_buffers, ties_of


def save_model(model: nn.Module, folder: str | Path) -> None:
    """Write the folder of a ParallelModule; all ranks call this. What a former model left there is replaced at the end.
    Raises CheckpointError if it cannot be written."""
    folder = Path(folder).expanduser()
    unfinished = folder / ".unfinished"
    agree.from_rank_zero(lambda: make_folder(unfinished))
    agree.everywhere(lambda: write_model(model, unfinished, adapters=False))
    agree.from_rank_zero(lambda: _move_in(unfinished, folder))


def write_model(model: nn.Module, folder: Path, adapters: bool = True, **options) -> dict[str, Written]:
    """Write this rank's files of the model, with or without what adaptations added to it, into an empty folder, on rank
    0 also the config. Returns them as `write_shards`, which takes the `options`, does."""
    written = write_shards(tensors_of(model, adapters), folder, STEM, model.stage_mesh, **options)
    return written | (write_config(model, folder) if dist.get_rank() == 0 else {})


def tensors_of(model: nn.Module, adapters: bool) -> dict[str, Held]:
    """Return the parameters and saved buffers that this rank has of a ParallelModule, each under one name: of a shared
    tensor's names the one under which transformers wants to find it."""
    later = {*(getattr(model, "all_tied_weights_keys", None) or ())}
    skipped = set()
    for names in ties_of(model):
        first = next((name for name in names if name not in later), names[0])
        skipped |= {*names} - {first}
    held = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *persistent_buffers(model)):
        if name not in skipped and (adapters or name not in model.adapter_names):
            held[name] = held_of(model, name, tensor)
    return held


def held_of(model: nn.Module, name: str, tensor) -> Held:
    """Return a parameter or buffer of a ParallelModule, in its layout; what has none is whole on every rank of its
    stage."""
    return Held(Form(tuple(tensor.shape), tensor.dtype), layout_of(model, name), lambda: local(tensor))


def layout_of(model: nn.Module, name: str) -> Layout:
    """Return the layout of a parameter or buffer of a ParallelModule."""
    return model.layouts.get(name) or Layout.replicated(_tensor(model, name).dim())


def _tensor(model: nn.Module, name: str) -> Tensor:
    owner, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(owner), leaf)


def whole(model: nn.Module, name: str, pp_ranks: Collection[int] | None = None) -> Tensor | None:
    """Return a parameter or buffer of a ParallelModule, gathered on every rank of some pipeline ranks (None: of all),
    perhaps more, and None on the others. All ranks call this."""
    stage, held = model.stage_mesh, model.pp_ranks_of(name)
    gathered = None
    if stage.pp_rank in held:
        tensor = _tensor(model, name)
        gathered = gather_everywhere(local(tensor), tensor.shape, layout_of(model, name), stage)
    if {*(range(len(stage.ranks)) if pp_ranks is None else pp_ranks)} <= {*held}:
        return gathered
    if gathered is None:
        gathered = torch.empty(model.elsewhere[name].shape, dtype=model.elsewhere[name].dtype, device=stage.device)
    with watch.collective("a tensor that another stage holds"):
        dist.broadcast(gathered.contiguous(), group=stage.pp_group, group_src=held[0])
    return gathered


def local(tensor):
    """Return what this rank holds of a DTensor or of a tensor that is the same on every rank."""
    return (_torch.local_of(tensor) if isinstance(tensor, DTensor) else tensor).detach()


def make_folder(folder: Path) -> str:
    """Make an empty folder of this name, whatever was there, and return its path. Raises CheckpointError if there
    cannot be one."""
    with disk_errors(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    return str(folder)


def write_config(model: nn.Module, folder: Path) -> dict[str, Digest]:
    """Write config.json and generation_config.json of a model that has them, as transformers does."""
    config = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained"):
        return {}
    config = copy.deepcopy(config)
    config.architectures = [type(model._source).__name__]
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    if dtype is not None:
        config.dtype = str(dtype).removeprefix("torch.")
    with disk_errors(folder):
        config.save_pretrained(folder)
        generation = getattr(model, "generation_config", None)
        if hasattr(generation, "save_pretrained"):
            generation.save_pretrained(folder)
        return {
            path.name: write_file(path, path.read_bytes()) for path in folder.glob("*config.json")
        }  # now on the disk


def _move_in(unfinished: Path, folder: Path) -> None:
    """Replace the model of `folder`. The index goes last: what it names is there."""
    new = sorted(unfinished.iterdir(), key=lambda path: path.name == index_name(STEM))
    with disk_errors(folder):
        for path in folder.glob(f"{STEM}*.safetensors*"):
            if path.name not in {p.name for p in new}:
                path.unlink()
        for path in new:
            os.replace(path, folder / path.name)
        unfinished.rmdir()
        sync_folder(folder)
