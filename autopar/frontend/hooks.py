"""Hooks of modules: those of forwards are traced, those of backwards would not run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, repeat

from torch import nn

from .. import _torch
from ..errors import CaptureError, InputError
from .user_lines import line_of_definition

FORWARD = ("_forward_hooks", "_forward_pre_hooks")
BACKWARD = ("_backward_hooks", "_backward_pre_hooks")


class Hooks:
    """The hooks of the modules of `model`, those of all modules, and forwards that were put in the place of a
    class's."""

    def __init__(self, model: nn.Module):
        own = [vars(module)[name] for module in model.modules() for name in (*FORWARD, *BACKWARD)]
        self.tables = [*own, *_torch.hooks_of_all_modules()]
        self.attributes = [vars(module) for module in model.modules()]

    def now(self) -> list[object]:
        """Return the numbers of all hooks, each of which torch gives out once, and a forward or None a module."""
        return [*chain.from_iterable(self.tables), *map(dict.get, self.attributes, repeat("forward"))]

    @contextmanager
    def forwards_of(self, state: list[object]) -> Iterator[None]:
        """Inside, modules have the forwards that they had then (see `now`)."""
        before = self.now()
        try:
            self._set_forwards(state)
            yield
        finally:
            self._set_forwards(before)

    def _set_forwards(self, state: list[object]) -> None:
        for own, forward in zip(self.attributes, state[-len(self.attributes) :], strict=True):
            own["forward"] = forward
            if forward is None:
                del own["forward"]


class Structure:
    """The modules that a model is made of."""

    def __init__(self, model: nn.Module):
        self.tables = [module._modules for module in model.modules()]
        self.before = self._now()

    def _now(self) -> list[nn.Module | None]:
        return [*chain.from_iterable(map(dict.values, self.tables))]

    def check(self) -> None:
        """Raise InputError if a module was added, taken out or replaced: its parameters are not among those that were
        planned."""
        if self._now() != self.before:
            raise InputError(
                "the modules of the model are not those that it was compiled with: one was added, taken out or "
                "replaced",
                fix="change the model before autopar.compile",
            )


def refuse_backward_hooks(model: nn.Module) -> None:
    """Raise CaptureError if a module in the model has a backward hook."""
    for path, module in model.named_modules():
        if any(vars(module)[name] for name in BACKWARD):
            hook = next(hook for name in BACKWARD for hook in vars(module)[name].values())
            raise CaptureError(
                f"{path or 'the model'} has a backward hook, which a compiled model would not run: its graphs have no "
                f"modules",
                source=line_of_definition(hook),
                fix="use hooks of parameters (parameter.register_hook), or a torch.autograd.Function in the forward",
            )
