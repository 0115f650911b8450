"""A converted model as a folder: quantization.json, which says what layers are quantized and how, and
model.safetensors."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from torch import Tensor, nn

from ..adapt.grid import Grid
from ..adapt.quantized_weight import QuantizedEmbedding, QuantizedLinear, QuantizedStack, QuantizedWeight, stack_name
from ..errors import AdaptError
from .durable import disk_errors, sync_folder, write_file
from .model_folder import make_folder
from .tensor_file import Form, TensorFile, TensorFileWriter, in_order
from .weights import STEM, persistent_buffers, shortened, single_name

CONFIG = "quantization.json"


def save_quantized(model: nn.Module, folder: str | Path) -> None:
    """Write what `autopar.convert` made, and the config of a Hugging Face model. Raises CheckpointError if it cannot be
    written."""
    folder = Path(folder).expanduser()
    unfinished = folder / ".unfinished"
    make_folder(unfinished)
    tensors = _tensors(model)
    forms = {name: Form(tuple(t.shape), t.dtype) for name, t in tensors.items()}
    layers = {path: _described(m) for path, m in model.named_modules() if isinstance(m, QuantizedWeight)}
    with disk_errors(folder):
        writer = TensorFileWriter(unfinished / single_name(STEM), forms)
        for name in in_order(forms):
            writer.append(tensors[name])
        writer.close()
        write_file(unfinished / CONFIG, json.dumps({"layers": layers}, indent=2, sort_keys=True).encode())
        if hasattr(getattr(model, "config", None), "save_pretrained"):
            model.config.save_pretrained(unfinished)
        for path in unfinished.iterdir():
            os.replace(path, folder / path.name)
        unfinished.rmdir()
        sync_folder(folder)


def load_quantized(model: nn.Module, folder: str | Path) -> nn.Module:
    """Fill a plain model of the class that was converted with what `autopar.convert(..., folder=folder)` wrote, in
    place: its layers are replaced by quantized ones. Returns it in eval mode.

    Raises AdaptError for a model on the meta device, another model's folder or one without a readable
    quantization.json, WeightsError for a damaged file."""
    folder = Path(folder).expanduser()
    layers, modules = _read_layers(folder / CONFIG), dict(model.named_modules())
    stacks = {f"{path}.{stack_name(leaf)}": (m, leaf) for path, m in modules.items() for leaf in m._parameters}
    if missing := [
        p for p, layer in layers.items() if p not in (stacks if isinstance(layer, QuantizedStack) else modules)
    ]:
        raise AdaptError(
            f"{folder} is of another model, with {shortened(missing)}", fix="build the model that was converted"
        )
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise AdaptError("the model is on the meta device", fix="build it on a device: its values are overwritten")
    for path, layer in layers.items():
        if isinstance(layer, QuantizedStack):
            module, leaf = stacks[path]
            layer.to(module.get_parameter(leaf).device).stand_for(module, leaf)
        else:
            model.set_submodule(path, layer.to(modules[path].weight.device))
    file = TensorFile(folder / single_name(STEM))
    try:
        _fill(model, file, folder)
    finally:
        file.close()
    return model.eval()


@torch.no_grad()
def _fill(model: nn.Module, file: TensorFile, folder: Path) -> None:
    wanted = {name: Form(tuple(t.shape), t.dtype) for name, t in _tensors(model).items()}
    if different := sorted(n for n in wanted.keys() | file.forms.keys() if wanted.get(n) != file.forms.get(n)):
        raise AdaptError(
            f"{folder} is of another model: {shortened(different)} are only in one of them, or of another shape or "
            f"dtype",
            fix="build the model that was converted",
        )
    for name, tensor in _tensors(model).items():
        tensor.copy_(file.read(name))


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and saved buffers by name, shared ones once."""
    return {**dict(model.named_parameters()), **dict(persistent_buffers(model))}


def _described(layer: QuantizedWeight) -> dict:
    shape = [*layer.weight.shape[:-1], layer.features]
    fields = {"shape": shape, "grid": layer.grid.to_json(), "dtype": str(layer.dtype)}
    if isinstance(layer, QuantizedEmbedding):
        return fields | {"kind": "embedding"}
    if isinstance(layer, QuantizedStack):
        return fields | {"kind": "stack", "is_transposed": layer.is_transposed}
    grid = layer.activation_grid
    return fields | {"kind": "linear", "bias": layer.bias is not None, "activation_grid": grid and grid.to_json()}


def _read_layers(path: Path) -> dict[str, QuantizedWeight]:
    try:
        return {name: _layer(fields) for name, fields in json.loads(path.read_text())["layers"].items()}
    except OSError as error:
        raise AdaptError(
            f"cannot read {path}: {error.strerror}", fix="give a folder that autopar.convert wrote"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise AdaptError(
            f"{path} does not describe quantized layers: {error}", fix="convert the model again"
        ) from error


def _layer(fields: dict) -> QuantizedWeight:
    shape, grid = tuple(fields["shape"]), Grid.from_json(fields["grid"])
    dtype = getattr(torch, fields["dtype"].removeprefix("torch."))
    if fields["kind"] == "embedding":
        return QuantizedEmbedding(shape, grid, dtype)
    if fields["kind"] == "stack":
        return QuantizedStack(shape, grid, dtype, fields["is_transposed"])
    activation_grid = fields["activation_grid"] and Grid.from_json(fields["activation_grid"])
    return QuantizedLinear(shape, grid, dtype, activation_grid, fields["bias"])
