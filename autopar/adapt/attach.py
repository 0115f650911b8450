"""What adaptations add to a model before it is traced, and how it is taken away again.

The user's model file stays as it is: its forward neither knows nor reads what is added here. Passes over the traced graph read it
(see passes/lora.py), and `autopar.compile` takes it over with the rest of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class Attachment:
    """Changes of one model. `device` is where values that are added live; on "meta" nothing is drawn. `seed`: of what is drawn."""

    def __init__(self, model: nn.Module, device: str | torch.device = "meta", seed: int = 0):
        self.model, self.device, self.seed = model, torch.device(device), seed
        self.added: set[str] = set()  # names of parameters and buffers that the model's own files do not hold
        self._undo: list[Callable[[], None]] = []

    def add(self, path: str, name: str, tensor: torch.Tensor, trainable: bool = True) -> None:
        """A parameter `name` (dotted: in modules that are made for it) of the module at `path`."""
        owner = self._owner(self.model.get_submodule(path), name)
        leaf = name.rpartition(".")[2]
        owner.register_parameter(leaf, nn.Parameter(tensor, requires_grad=trainable))
        self._note(path, name, lambda: owner._parameters.pop(leaf))

    def add_buffer(self, path: str, name: str, tensor: torch.Tensor) -> None:
        """A saved buffer of the module at `path`."""
        owner = self._owner(self.model.get_submodule(path), name)
        leaf = name.rpartition(".")[2]
        owner.register_buffer(leaf, tensor)
        self._note(path, name, lambda: owner._buffers.pop(leaf))

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
        """A plain attribute for the pass to find; equal values do not keep blocks of a tower from being alike."""
        setattr(module, name, value)
        self._undo.append(lambda: delattr(module, name))

    def train(self, parameter: nn.Parameter, trainable: bool) -> None:
        """Freeze a parameter, or let it train."""
        before = parameter.requires_grad
        parameter.requires_grad_(trainable)
        self._undo.append(lambda: parameter.requires_grad_(before))

    def undo(self) -> None:
        """The model as it was."""
        while self._undo:
            self._undo.pop()()
        self.added.clear()
