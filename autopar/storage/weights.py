"""`weights=FOLDER`: values for a model on the meta device; each rank reads what it holds from a Hugging Face
safetensors folder.

Never in memory: the model, or more than the largest single tensor besides this rank's shards. (Where the folder stores
a tensor in another form, such as one file tensor an expert, its parts and the result are there at once.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import WeightsError
from ..ir.layout import Layout, local_ranges
from ..ir.mesh import Mesh
from . import huggingface
from .tensor_file import Form, TensorFile, cut

STEM = "model"  # of the files of a model
SHOWN = 8  # names of one kind in an error


def single_name(stem: str) -> str:
    """Return the name of the file of tensors that are not sharded into several."""
    return f"{stem}.safetensors"


def index_name(stem: str) -> str:
    """Return the name of the file that says which shard has which tensor."""
    return f"{stem}.safetensors.index.json"


class WeightsFolder:
    """The tensors of a folder with model.safetensors, or with shards and model.safetensors.index.json, by their names
    there. In a folder that has both, the one file counts and the index does not, as for transformers'
    `from_pretrained`."""

    def __init__(self, folder: str | Path, stem: str = STEM):
        self.folder, self._single, self._index = Path(folder).expanduser(), single_name(stem), index_name(stem)
        self._files = [TensorFile(path) for path in self._paths()]
        self._file_of = {name: file for file in self._files for name in file.forms}
        self.forms: dict[str, Form] = {name: file.forms[name] for name, file in self._file_of.items()}

    def _paths(self) -> list[Path]:
        if (single := self.folder / self._single).is_file():
            return [single]
        try:
            names = set(json.loads((self.folder / self._index).read_text())["weight_map"].values())
            if any(type(name) is not str or Path(name).name != name for name in names):
                raise ValueError("it names files outside of the folder")
        except OSError as error:
            raise WeightsError(
                f"{self.folder} has neither {self._single} nor {self._index}",
                fix="give a folder that save_pretrained wrote",
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            index = self.folder / self._index
            raise WeightsError(f"{index} is not an index of weights: {error}", fix="fetch or save it again") from error
        return [self.folder / name for name in sorted(names)]

    def read(self, name: str, ranges=None) -> Tensor:
        """Return a tensor, or the elements of it in `ranges`; see TensorFile.read."""
        return self._file_of[name].read(name, ranges)

    def close(self) -> None:
        """Close all files."""
        for file in self._files:
            file.close()


@dataclass(frozen=True)
class Stored:
    """The location of a model's tensor: alone under `name`, or (`group`) as a result, `name`, of a conversion of
    several."""

    name: str
    group: huggingface.Group | None = None


class Weights:
    """A folder opened for a model. Raises WeightsError for a folder that cannot be read and for one whose tensors are
    not those of the model: all that are missing, unexpected or of another shape are named. Gives buffers that are not
    saved (rotary frequencies) their values, and raises WeightsError with the names of those for which it cannot."""

    def __init__(self, model: nn.Module, folder: str | Path, error: type[WeightsError] = WeightsError):
        self._folder = WeightsFolder(folder)
        self._cached: tuple[object, dict[str, Tensor]] = (None, {})
        shapes = shapes_of(model)
        names = huggingface.names_in(model, self._folder.forms, shapes)
        self._stored = {name: Stored(file_name) for name, file_name in names.alone.items()}
        for group in names.groups:
            self._stored |= {name: Stored(name, group) for name in group.forms}
        for tied in ties_of(model):
            found = next((self._stored[name] for name in tied if name in self._stored), None)
            if found is not None:
                self._stored |= {name: self._stored.get(name, found) for name in tied}
        found = {name: self.form(name).shape for name in self._stored}
        compare(shapes, found, names.unexpected, self._folder.folder, error)
        _fill_buffers(model)

    def form(self, name: str) -> Form:
        """Return the shape and dtype in which one of the model's tensors is stored."""
        stored = self._stored[name]
        return stored.group.forms[stored.name] if stored.group else self._folder.forms[stored.name]

    def part(self, name: str, dtype: torch.dtype, layout: Layout, mesh: Mesh, coordinate: Mapping[str, int]) -> Tensor:
        """Return a rank's part of one of the model's tensors in `dtype`."""
        stored = self._stored[name]
        ranges = local_ranges(self.form(name).shape, layout, mesh, coordinate)
        if stored.group is None:
            return self._folder.read(stored.name, ranges).to(dtype)
        if self._cached[0] is not stored.group or name not in self._cached[1]:
            self._cached = None, {}  # before there is another
            self._cached = stored.group, stored.group.convert(self._folder.read)
        return cut(self._cached[1].pop(name), ranges).to(dtype, copy=True, memory_format=torch.contiguous_format)

    def close(self) -> None:
        """Close the files, and drop what the last conversion left."""
        self._cached = None, {}
        self._folder.close()


def _fill_buffers(model: nn.Module) -> None:
    if left := huggingface.fill_unsaved_buffers(model):
        raise WeightsError(
            f"no file holds buffers of the model that are not saved with it, and they are on the meta device: "
            f"{', '.join(left)}",
            fix="give them their values before autopar.compile (module.buffer = tensor); only what is saved need be on "
            "meta",
        )


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all that is saved of a model, every name of a shared tensor included."""
    return {name: tuple(tensor.shape) for name, tensor in _saved(model)}


def _saved(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers that are saved, also those that a compiled model has in its other stages."""
    elsewhere = getattr(model, "elsewhere", {}).items()
    return [*model.named_parameters(remove_duplicate=False), *persistent_buffers(model), *elsewhere]


def persistent_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the buffers that a state dict holds, every name of a shared one included."""
    found = []
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found.append((f"{path}.{name}" if path else name, buffer))
    return found


def ties_of(model: nn.Module) -> list[list[str]]:
    """Return groups of names that are one tensor, in the order of the model."""
    names: dict[int, list[str]] = {}
    for name, tensor in _saved(model):
        names.setdefault(id(tensor), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def compare(wanted: Mapping, found: Mapping, unexpected: list[str], where: object, error: type) -> None:
    """Raise `error` if the tensors of a model, name -> shape, are not those found in `where`."""
    lines = []
    for what, names in (("missing", [n for n in wanted if n not in found]), ("unexpected", list(unexpected))):
        if names:
            lines.append(f"{what}: {shortened(names)}")
    differ = [f"{n} {found[n]}, not {wanted[n]}" for n in wanted if n in found and tuple(found[n]) != tuple(wanted[n])]
    if differ:
        lines.append(f"of another shape: {shortened(differ)}")
    if lines:
        raise error(
            f"{where} is of another model; {'; '.join(lines)}",
            fix="build the model from the config.json of that folder",
        )


def shortened(names: list[str]) -> str:
    """Return the first SHOWN names as text, and how many more there are."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
