"""A forward that is set on the compiled module: `model.forward = mine`.

It becomes the source's own forward, so that the next call is captured with it. Libraries set one that calls the former
(`before = model.forward`), so that a forward that is read has two meanings: for who calls it, the compiled call; while
the model is traced, the forward that the source had when it was read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType, MethodType
from weakref import WeakKeyDictionary

from torch import nn

from ..frontend.fake_parameters import is_tracing

# What the forwards that are made here are of the source: one of its own, or that of its class (None).
_of_source: WeakKeyDictionary[Callable, Callable | None] = WeakKeyDictionary()


def forward_of(kind: type[nn.Module], source: type[nn.Module]) -> Callable:
    """Return the forward of a class of modules in front of `source`s: with their signature, since libraries choose by
    it what they pass."""

    @functools.wraps(source.forward)
    def forward(self, *args, **kwargs):
        if is_tracing():
            return source.forward(self if isinstance(self, source) else self._source, *args, **kwargs)
        return kind.forward(self, *args, **kwargs)

    _of_source[forward] = None
    return forward


def show_forward(module: nn.Module) -> None:
    """Give `module` a forward of its own if its source has one."""
    mine = vars(module._source).get("forward")
    if mine is None:
        vars(module).pop("forward", None)
        return

    @functools.wraps(mine)
    def forward(*args, **kwargs):
        return mine(*args, **kwargs) if is_tracing() else type(module).forward(module, *args, **kwargs)

    _of_source[forward] = mine
    vars(module)["forward"] = forward


def set_forward(module: nn.Module, value: Callable) -> None:
    """Let `value` be the forward of the source of `module`; of a method of the module, the same of its source. One that
    was read of the module stands for that of the source."""
    function, of_source = value, value
    if isinstance(value, MethodType) and value.__self__ is module:
        function, of_source = value.__func__, MethodType(value.__func__, module._source)
    forward = _of_source.get(function, of_source) if isinstance(function, FunctionType) else of_source
    if forward is None:  # that of the class
        vars(module._source).pop("forward", None)
    else:
        vars(module._source)["forward"] = forward
    show_forward(module)
