"""LoRA adapters as the folder that PEFT reads and writes: adapter_config.json and adapter_model.safetensors.

The file has what trains and nothing else, whole tensors under "base_model.model." and the name that PEFT's modules give them: an
adapter as it is, a bias of an adapted module behind ".base_layer" (https://huggingface.co/docs/peft/developer_guides/checkpoint).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist
from torch import Tensor, nn

from ..adapt.lora import LoRA
from ..errors import AdaptError
from ..layout import Layout, local_ranges
from ..runtime import agree
from .durable import disk_errors, write_file
from .model_folder import local, make_folder
from .shards import Held, write_shards
from .tensor_file import Form, TensorFile
from .weights import shortened, single_name

CONFIG, STEM = "adapter_config.json", "adapter_model"
PREFIX = "base_model.model."
# What has to be equal for the values of one adapter to mean the same in another.
SAME = ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")


def file_names(model: nn.Module) -> dict[str, str]:
    """Name of every tensor of a ParallelModule that its adapter's file holds -> its name there."""
    parameters, names = dict(model.named_parameters()), _names_there(model)
    return {name: names[name] for name in names if name in model.adapter_names or parameters[name].requires_grad}


def _names_there(model: nn.Module) -> dict[str, str]:
    """The name that PEFT's module has for every parameter of a ParallelModule: behind ".base_layer" if its module is adapted."""
    adapted = {name.partition(".lora_")[0].removesuffix(".base_layer") for name in model.adapter_names if ".lora_" in name}
    names = {}
    for name, _ in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        is_inner = name not in model.adapter_names and path in adapted
        names[name] = f"{PREFIX}{path}.base_layer.{leaf}" if is_inner else PREFIX + name
    return names


def save_adapter(model: nn.Module, config: LoRA, folder: str | Path) -> None:
    """Write the folder; all ranks call this, rank 0 gathers and writes, a tensor at a time. Raises CheckpointError if it cannot be
    written."""
    folder = Path(folder).expanduser()
    unfinished = folder / ".unfinished"
    parameters, held = dict(model.named_parameters()), {}
    for name, stored in file_names(model).items():
        tensor = parameters[name]
        layout = model.layouts.get(name) or Layout.replicated(tensor.dim())
        held[stored] = Held(Form(tuple(tensor.shape), tensor.dtype), layout, lambda t=tensor: local(t))
    agree.from_rank_zero(lambda: make_folder(unfinished))
    agree.everywhere(lambda: write_shards(held, unfinished, STEM, model.plan.mesh, files=1))

    def move_in() -> None:
        with disk_errors(folder):
            os.replace(unfinished / single_name(STEM), folder / single_name(STEM))
            unfinished.rmdir()
            write_file(folder / CONFIG, json.dumps(peft_config(model, config), indent=2, sort_keys=True).encode())

    agree.from_rank_zero(move_in)


def peft_config(model: nn.Module, config: LoRA) -> dict:
    """The fields of PEFT's LoraConfig."""
    fields = asdict(config)
    sources = {type(m).__name__ for n, m in model._source.named_modules() if "lora_sites" in vars(m)}
    name = getattr(getattr(model, "config", None), "_name_or_path", "") or None
    lists = {k: _listed(fields[k]) for k in ("target_modules", "exclude_modules", "target_parameters", "modules_to_save")}
    return fields | lists | {
        "peft_type": "LORA", "task_type": None, "inference_mode": True, "base_model_name_or_path": name,
        "fan_in_fan_out": "Conv1D" in sources,
    }  # fmt: skip


def _listed(targets) -> list | str | None:
    return targets if isinstance(targets, str) else list(targets) or None


def load_adapter(model: nn.Module, config: LoRA, folder: str | Path) -> dict[str, Tensor]:
    """This rank's parts of the adapter in a folder, by parameter name. Only they are read. PEFT saves an adapted embedding whole
    besides: what a file has of the base is read too.

    Raises AdaptError for an adapter of another model or with other settings than the one compiled, with all that differs."""
    folder = Path(folder).expanduser()
    _check_config(folder / CONFIG, config)
    file = TensorFile(folder / single_name(STEM))
    try:
        parameters = dict(model.named_parameters())
        names = file_names(model) | {n: there for n, there in _names_there(model).items() if there in file.forms}
        _compare({names[n]: tuple(parameters[n].shape) for n in names}, {n: f.shape for n, f in file.forms.items()}, folder)
        coordinate = model.plan.mesh.coordinate(dist.get_rank())
        parts = {}
        for name, stored in names.items():
            layout = model.layouts.get(name) or Layout.replicated(parameters[name].dim())
            ranges = local_ranges(tuple(parameters[name].shape), layout, model.plan.mesh, coordinate)
            parts[name] = file.read(stored, ranges).to(parameters[name].dtype)
        return parts
    finally:
        file.close()


def _check_config(path: Path, config: LoRA) -> None:
    try:
        found = json.loads(path.read_text())
        kind = found["peft_type"]
    except OSError as error:
        raise AdaptError(f"cannot read {path}: {error.strerror}", fix="give a folder that save_adapter or PEFT wrote") from error
    except (ValueError, KeyError, TypeError) as error:
        raise AdaptError(f"{path} is not a configuration of an adapter: {error}", fix="save it again") from error
    if kind != "LORA":
        raise AdaptError(f"{path} is of a {kind} adapter", fix="load adapters of LoRA")
    mine = asdict(config)
    empty = {"rank_pattern": {}, "alpha_pattern": {}, "use_dora": False, "use_rslora": False}
    different = [f"{k} is {found.get(k) or empty.get(k)} there, {mine[k]} here" for k in SAME
                 if (found.get(k) or empty.get(k)) != mine[k]]  # fmt: skip
    if different:
        raise AdaptError(
            f"{path.parent} has an adapter of other settings: {'; '.join(different)}",
            fix="compile with adapt=[autopar.LoRA(...)] of the same settings",
        )


def _compare(wanted: Mapping[str, tuple], found: Mapping[str, tuple], folder: Path) -> None:
    lines = []
    for what, names in (("missing", [n for n in wanted if n not in found]), ("unexpected", [n for n in found if n not in wanted])):
        if names:
            lines.append(f"{what}: {shortened([n.removeprefix(PREFIX) for n in names])}")
    differ = [f"{n.removeprefix(PREFIX)} {found[n]}, not {wanted[n]}" for n in wanted if n in found and found[n] != wanted[n]]
    if differ:
        lines.append(f"of another shape: {shortened(differ)}")
    if lines:
        raise AdaptError(
            f"{folder} has an adapter of another model or other targets; {'; '.join(lines)}",
            fix="compile with the target_modules that its adapter_config.json names",
        )
