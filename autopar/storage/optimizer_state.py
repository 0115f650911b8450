"""The state of any torch optimizer by the names of parameters: tensors for a tensor file, the rest for JSON.

A state tensor like its parameter (momentum) is sharded as the parameter is; any other is stored whole. Under a pipeline
every rank has an optimizer of its own parameters, and what is stored is that of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from ..errors import CheckpointError, CheckpointMismatch
from ..ir.layout import Layout, local_ranges
from ..processes.dtensors import as_dtensor
from ..processes.stage_mesh import StageMesh
from .gather import Held
from .model_folder import local
from .plain import decode, encode
from .tensor_file import Form
from .weights import WeightsFolder, shortened

LIKE_PARAMETER, WHOLE_DTENSOR, PLAIN = "like parameter", "whole", "plain"


def describe(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Held], dict]:
    """Return (tensors by "PARAMETER/KEY", the rest as JSON). Raises CheckpointError for parameters of another model and
    for state that is neither tensors nor plain values."""
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [
        {"params": _names_of(group["params"], names)}
        | {"options": encode({k: v for k, v in group.items() if k != "params"}, f"param_groups[{i}]")}
        for i, group in enumerate(optimizer.param_groups)
    ]
    held: dict[str, Held] = {}
    states: dict[str, dict] = {}
    for name, parameter in model.named_parameters():
        if parameter not in optimizer.state:
            continue
        states[name] = {}
        for key, value in sorted(optimizer.state[parameter].items()):  # equal states give equal files
            if isinstance(value, torch.Tensor):
                kind, held[f"{name}/{key}"] = _held(model, name, parameter, value)
                states[name][key] = {"tensor": kind, "device": value.device.type}
            else:
                states[name][key] = {"value": encode(value, f"state[{name}][{key}]")}
    return held, {"class": type(optimizer).__name__, "groups": groups, "state": states}


def of_all_stages(described: dict, stage: StageMesh) -> dict:
    """Return what the optimizers of all stages say together. All ranks call this."""
    return together(stage.from_all_pp_ranks(described, "what the stages' optimizers hold"))


def is_collective(described: dict) -> bool:
    """Return whether all ranks of a stage have to give some of an optimizer's state together."""
    return any(
        saved.get("tensor") == WHOLE_DTENSOR for values in described["state"].values() for saved in values.values()
    )


def together(everyone: list[dict]) -> dict:
    """Return what the optimizers of several ranks say together, of a parameter that several have what the first says.
    Raises CheckpointError if they are not of one kind with the same groups."""
    if len({(other["class"], len(other["groups"])) for other in everyone}) > 1:
        kinds = ", ".join(f"{other['class']} with {len(other['groups'])} groups" for other in everyone)
        raise CheckpointError(
            f"ranks have different optimizers: {kinds}", fix="build the same one on every rank, with all groups"
        )
    groups = []
    for same in zip(*(other["groups"] for other in everyone)):
        groups.append(same[0] | {"params": list(dict.fromkeys(name for group in same for name in group["params"]))})
    state = {name: values for other in reversed(everyone) for name, values in other["state"].items()}
    return everyone[0] | {"groups": groups, "state": state}


def _names_of(parameters: list, names: Mapping[int, str]) -> list[str]:
    if any(id(p) not in names for p in parameters):
        raise CheckpointError(
            "the optimizer has parameters that are not the model's",
            fix="build it from the parameters() of the compiled model",
        )
    return [names[id(p)] for p in parameters]


def _held(model: nn.Module, name: str, parameter: DTensor, value: torch.Tensor) -> tuple[str, Held]:
    form = Form(tuple(value.shape), value.dtype)
    if not isinstance(value, DTensor):
        return PLAIN, Held(form, Layout.replicated(value.dim()), lambda: value.detach())
    if value.shape == parameter.shape and value.placements == parameter.placements:
        return LIKE_PARAMETER, Held(form, model.layouts[name], lambda: local(value))
    return WHOLE_DTENSOR, Held(form, Layout.replicated(value.dim()), lambda: value.full_tensor().detach())


def check(model: nn.Module, optimizer: torch.optim.Optimizer, described: dict) -> None:
    """Raise CheckpointMismatch with all differences between an optimizer and a saved one."""
    names = {id(p): name for name, p in model.named_parameters()}
    mine = [_names_of(group["params"], names) for group in optimizer.param_groups]
    saved = [[n for n in group["params"] if n not in model.elsewhere] for group in described["groups"]]
    lines = []
    if type(optimizer).__name__ != described["class"]:
        lines.append(f"it is {described['class']}, not {type(optimizer).__name__}")
    if len(mine) != len(saved):
        lines.append(f"it has {len(saved)} parameter groups, not {len(mine)}")
    for i, (ours, theirs) in enumerate(zip(mine, saved)):
        for what, found in (
            ("lacks", [n for n in ours if n not in theirs]),
            ("also has", [n for n in theirs if n not in ours]),
        ):
            if found:
                lines.append(f"group {i} {what} {shortened(found)}")
    if lines:
        raise CheckpointMismatch(
            f"the checkpoint's optimizer is another one: {'; '.join(lines)}", fix="build the same optimizer"
        )


def check_values(model: nn.Module, forms: Mapping[str, Form], described: dict) -> None:
    """Raise an error of some kind if what is described cannot be decoded, or its tensors are not among `forms` in the
    shapes of their parameters."""
    parameters = dict(model.named_parameters())
    for group in described["groups"]:
        dict(decode(group["options"]))
    for name, values in described["state"].items():
        for key, saved in values.items() if name in parameters else ():
            if "value" in saved:
                decode(saved["value"])
                continue
            torch.device(saved["device"])
            form = forms[f"{name}/{key}"]
            if saved["tensor"] not in (LIKE_PARAMETER, WHOLE_DTENSOR, PLAIN):
                raise ValueError(f"{name}/{key} is a tensor of no known kind")
            if saved["tensor"] == LIKE_PARAMETER and form.shape != tuple(parameters[name].shape):
                raise ValueError(f"{name}/{key} has not the shape of its parameter")


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, folder: WeightsFolder, described: dict) -> None:
    """Give the optimizer the saved state, cut for this rank. Call `check` before."""
    parameters, stage = dict(model.named_parameters()), model.stage_mesh
    mesh = stage.mesh
    for group, saved in zip(optimizer.param_groups, described["groups"]):
        group["params"] = [parameters[name] for name in saved["params"] if name in parameters]
        group.update(decode(saved["options"]))
    optimizer.state.clear()
    for name, values in described["state"].items():
        if name not in parameters:
            continue
        state = optimizer.state[parameters[name]]
        for key, saved in values.items():
            stored = f"{name}/{key}"
            if "value" in saved:
                state[key] = decode(saved["value"])
            elif saved["tensor"] == LIKE_PARAMETER:
                layout, shape = model.layouts[name], folder.forms[stored].shape
                part = folder.read(stored, local_ranges(shape, layout, mesh, stage.coordinate)).to(saved["device"])
                state[key] = as_dtensor(part, shape, layout, mesh, stage.device_mesh)
            else:
                whole = folder.read(stored).to(saved["device"])
                is_plain = saved["tensor"] == PLAIN
                state[key] = (
                    whole if is_plain else DTensor.from_local(whole, stage.device_mesh, [Replicate()] * len(mesh.names))
                )
