"""Attach to a model what adaptations add before it is traced, and take it away again.

The user's model file stays as it is: its forward neither knows nor reads what is added here. Passes over the traced
graph read it (see passes/adapt/lora.py), and `autopar.compile` takes it over with the rest of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Replaced:
    """A parameter that the compiled model does not have: it has `names`, which `compute` makes from its value, in this
    order."""

    names: tuple[str, ...]
    compute: Callable[[Tensor], tuple[Tensor, ...]]


class Attachment:
    """Changes of one model. `device` is where values that are added live; on "meta" nothing is drawn. `seed`: of what
    is drawn. `reads_files`: the values that the model has now are not those that it will have."""

    def __init__(self, model: nn.Module, device: str | torch.device = "meta", seed: int = 0, reads_files: bool = False):
        self.reads_files = reads_files
        self.model, self.device, self.seed = model, torch.device(device), seed
        self.added: set[str] = set()  # names of parameters and buffers that the model's own files do not hold
        self.replaced: dict[str, Replaced] = {}  # by name of the parameter
        self._undo: list[Callable[[], None]] = []

    def add(self, path: str, name: str, tensor: Tensor, trainable: bool = True) -> None:
        """Add a parameter `name` (dotted: in modules that are made for it) to the module at `path`."""
        owner = self._owner(self.model.get_submodule(path), name)
        leaf = name.rpartition(".")[2]
        owner.register_parameter(leaf, nn.Parameter(tensor, requires_grad=trainable))
        self._note(path, name, lambda: owner._parameters.pop(leaf))

    def add_buffer(self, path: str, name: str, tensor: Tensor) -> None:
        """Add a saved buffer to the module at `path`."""
        owner = self._owner(self.model.get_submodule(path), name)
        leaf = name.rpartition(".")[2]
        owner.register_buffer(leaf, tensor)
        self._note(path, name, lambda: owner._buffers.pop(leaf))

    def replace(
        self,
        path: str,
        name: str,
        forms: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        compute: Callable[[Tensor], tuple[Tensor, ...]],
    ) -> None:
        """Put frozen parameters of these names, shapes and dtypes in the place of parameter `name` of the module at
        `path`. They have no values here: whoever takes the model over computes them, one parameter at a time. The
        user's forward is traced with the one that they replace."""
        module, whole = self.model.get_submodule(path), f"{path}." if path else ""
        for new, (shape, dtype) in forms.items():
            module.register_parameter(
                new, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
            )
            self._undo.append(lambda n=new: module._parameters.pop(n))
        self.replaced[whole + name] = Replaced(tuple(whole + new for new in forms), compute)

    def fill(self) -> None:
        """Give the parameters that replace others their values, all at once."""
        for name, replaced in self.replaced.items():
            for new, value in zip(replaced.names, replaced.compute(self.model.get_parameter(name).detach())):
                path, _, leaf = new.rpartition(".")
                self.model.get_submodule(path)._parameters[leaf] = nn.Parameter(value, requires_grad=False)

    def _note(self, path: str, name: str, undo: Callable[[], object]) -> None:
        self.added.add(f"{path}.{name}" if path else name)
        self._undo.append(undo)

    def _owner(self, module: nn.Module, name: str) -> nn.Module:
        for part in name.split(".")[:-1]:
            if part not in module._modules:
                made = nn.Module()
                made.training = module.training
                module.add_module(part, made)
                self._undo.append(lambda m=module, p=part: m._modules.pop(p))
            module = module._modules[part]
        return module

    def mark(self, module: nn.Module, name: str, value: object) -> None:
        """Set a plain attribute for the pass to find; equal values do not keep repeated blocks from being alike."""
        setattr(module, name, value)
        self._undo.append(lambda: delattr(module, name))

    def train(self, parameter: nn.Parameter, trainable: bool) -> None:
        """Freeze a parameter, or let it train."""
        before = parameter.requires_grad
        parameter.requires_grad_(trainable)
        self._undo.append(lambda: parameter.requires_grad_(before))

    def undo(self) -> None:
        """Put the model back to what it was."""
        while self._undo:
            self._undo.pop()()
        self.added.clear()
        self.replaced.clear()


def marked(model: nn.Module, name: str) -> Iterator[tuple[str, nn.Module, Any]]:
    """Iterate over (path, module, one) of all that `Attachment.mark` set as an attribute `name` of modules."""
    for path, module in model.named_modules():
        for one in module.__dict__.get(name, ()):
            yield path, module, one
