"""LoRA adapters as the folder that PEFT reads and writes: adapter_config.json and adapter_model.safetensors.

The file has what trains and nothing else, whole tensors under "base_model.model." and the name that PEFT's modules give
them: an adapter as it is, a bias of an adapted module behind ".base_layer"
(https://huggingface.co/docs/peft/developer_guides/checkpoint).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from torch import Tensor, nn

from ..adapt.lora import LoRA
from ..adapt.lora_site import SITES
from ..errors import AdaptError
from ..ir.layout import local_ranges
from ..processes import agree
from .durable import disk_errors, write_file
from .model_folder import held_of, layout_of, make_folder
from .shards import write_shards
from .tensor_file import TensorFile
from .weights import shortened, single_name

CONFIG, STEM = "adapter_config.json", "adapter_model"
PREFIX = "base_model.model."
# What has to be equal for the values of one adapter to mean the same in another.
SAME = ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")
# Settings of PEFT under which the same tensors would mean something else.
NOT_OURS = (
    "alora_invocation_tokens",
    "layer_replication",
    "use_qalora",
    "lora_bias",
    "trainable_token_indices",
    "arrow_config",
)


def file_names(model: nn.Module) -> dict[str, str]:
    """Return, for every tensor that the file of a ParallelModule's adapter holds (adapters and what else trains, in all
    stages), its name there by its name in the model."""
    adapted = _adapted(model)
    trained = [n for n, p in _parameters(model).items() if n in model.adapter_names or p.requires_grad]
    return {name: _name_there(name, adapted, model) for name in trained}


def _base_names(model: nn.Module) -> dict[str, str]:
    """Return, for the names that PEFT's modules may give a parameter of the base, its first name; all names of a shared
    one."""
    first = {id(p): name for name, p in _parameters(model).items()}
    adapted = _adapted(model)
    names: dict[str, str] = {}
    for name, parameter in (*model.named_parameters(remove_duplicate=False), *model.elsewhere.items()):
        if name not in model.adapter_names and id(parameter) in first:
            names |= {there: first[id(parameter)] for there in (PREFIX + name, _name_there(name, adapted, model))}
    return names


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of all stages by name, a shared one by its first; those of other stages are on the meta
    device."""
    elsewhere = {id(p): (n, p) for n, p in reversed(model.elsewhere.items()) if isinstance(p, nn.Parameter)}
    return dict(model.named_parameters()) | dict(elsewhere.values())


def _adapted(model: nn.Module) -> set[str]:
    """Return the names of the modules with adapters."""
    return {name.partition(".lora_")[0].removesuffix(".base_layer") for name in model.adapter_names if ".lora_" in name}


def _name_there(name: str, adapted: set[str], model: nn.Module) -> str:
    """Return what PEFT calls a parameter: the base's of an adapted module are behind ".base_layer"."""
    path, _, leaf = name.rpartition(".")
    return f"{PREFIX}{path}.base_layer.{leaf}" if name not in model.adapter_names and path in adapted else PREFIX + name


def save_adapter(model: nn.Module, config: LoRA, trained: Sequence[str], folder: str | Path) -> None:
    """Write the folder with the parameters called `trained`; all ranks call this, rank 0 gathers and writes, a tensor
    at a time, of all stages. Raises CheckpointError if it cannot be written."""
    folder = Path(folder).expanduser()
    unfinished = folder / ".unfinished"
    parameters, held = dict(model.named_parameters()), {}
    adapted = _adapted(model)
    for name in (n for n in trained if n in parameters):
        held[_name_there(name, adapted, model)] = held_of(model, name, parameters[name])
    agree.from_rank_zero(lambda: make_folder(unfinished))
    agree.everywhere(lambda: write_shards(held, unfinished, STEM, model.stage_mesh, writer_rank=0))

    def move_in() -> None:
        with disk_errors(folder):
            os.replace(unfinished / single_name(STEM), folder / single_name(STEM))
            unfinished.rmdir()
            write_file(folder / CONFIG, json.dumps(peft_config(model, config), indent=2, sort_keys=True).encode())

    agree.from_rank_zero(move_in)


def peft_config(model: nn.Module, config: LoRA) -> dict:
    """Return the fields of PEFT's LoraConfig."""
    fields = asdict(config)
    sources = {type(m).__name__ for n, m in model._source.named_modules() if SITES in vars(m)}
    name = getattr(getattr(model, "config", None), "_name_or_path", "") or None
    lists = {
        k: _listed(fields[k]) for k in ("target_modules", "exclude_modules", "target_parameters", "modules_to_save")
    }
    return fields | lists | {
        "peft_type": "LORA", "task_type": None, "inference_mode": True, "base_model_name_or_path": name,
        "fan_in_fan_out": "Conv1D" in sources,
    }  # fmt: skip


def _listed(targets) -> list | str | None:
    return targets if isinstance(targets, str) else list(targets) or None


def load_adapter(model: nn.Module, config: LoRA, trained: Sequence[str], folder: str | Path) -> dict[str, Tensor]:
    """Return this rank's parts of the adapter in a folder, by parameter name. Only they are read. PEFT saves an adapted
    embedding whole besides: what a file has of the base is read too.

    Raises AdaptError for an adapter of another model or with other settings than the one compiled, with all that
    differs."""
    folder = Path(folder).expanduser()
    _check_config(folder / CONFIG, config)
    file = TensorFile(folder / single_name(STEM))
    try:
        parameters, stage = _parameters(model), model.stage_mesh
        adapted = _adapted(model)
        names = {n: there for there, n in _base_names(model).items() if there in file.forms}
        names |= {name: _name_there(name, adapted, model) for name in trained}
        _compare(
            {names[n]: tuple(parameters[n].shape) for n in names}, {n: f.shape for n, f in file.forms.items()}, folder
        )
        parts = {}
        for name, stored in names.items():
            if name in model.elsewhere:
                continue
            ranges = local_ranges(tuple(parameters[name].shape), layout_of(model, name), stage.mesh, stage.coordinate)
            parts[name] = file.read(stored, ranges).to(parameters[name].dtype)
        return parts
    finally:
        file.close()


def _check_config(path: Path, config: LoRA) -> None:
    try:
        found = json.loads(path.read_text())
        kind = found["peft_type"]
    except OSError as error:
        raise AdaptError(
            f"cannot read {path}: {error.strerror}", fix="give a folder that save_adapter or PEFT wrote"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise AdaptError(f"{path} is not a configuration of an adapter: {error}", fix="save it again") from error
    if kind != "LORA":
        raise AdaptError(f"{path} is of a {kind} adapter", fix="load adapters of LoRA")
    start = found.get("init_lora_weights", True)
    if start not in (True, False, None, "gaussian"):
        raise AdaptError(
            f"{path} is of an adapter that starts with {start!r}, which changes the base too",
            fix="save it in PEFT as an ordinary one: path_initial_model_for_weight_conversion",
        )
    if other := [key for key in NOT_OURS if found.get(key)]:
        raise AdaptError(
            f"{path} has {', '.join(f'{k}={found[k]!r}' for k in other)}, of which autopar knows nothing",
            fix="load adapters without it",
        )
    mine = asdict(config)
    empty = {"rank_pattern": {}, "alpha_pattern": {}, "use_dora": False, "use_rslora": False}
    different = [
        f"{k} is {found.get(k) or empty.get(k)} there, {mine[k]} here"
        for k in SAME
        if (found.get(k) or empty.get(k)) != mine[k]
    ]
    if different:
        raise AdaptError(
            f"{path.parent} has an adapter of other settings: {'; '.join(different)}",
            fix="compile with adapt=[autopar.LoRA(...)] of the same settings",
        )


def _compare(wanted: Mapping[str, tuple], found: Mapping[str, tuple], folder: Path) -> None:
    lines = []
    for what, names in (
        ("missing", [n for n in wanted if n not in found]),
        ("unexpected", [n for n in found if n not in wanted]),
    ):
        if names:
            lines.append(f"{what}: {shortened([n.removeprefix(PREFIX) for n in names])}")
    differ = [
        f"{n.removeprefix(PREFIX)} {found[n]}, not {wanted[n]}" for n in wanted if n in found and found[n] != wanted[n]
    ]
    if differ:
        lines.append(f"of another shape: {shortened(differ)}")
    if lines:
        raise AdaptError(
            f"{folder} has an adapter of another model or other targets; {'; '.join(lines)}",
            fix="compile with the target_modules that its adapter_config.json names",
        )
