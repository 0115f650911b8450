"""A module that speaks for another one: the attributes that it does not know are those of its source, to read and to
set.

What a user says of a compiled model (`model.temperature = 2.0`, `model.eval()`) is said of the model that is traced.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from .source_forward import forward_of, set_forward, show_forward
from .source_methods import method_of_source

CONTAINER = ("__getitem__", "__len__", "__iter__", "__contains__")  # methods that Python looks up in the class


def _class_for(kind: type[nn.Module], source: type[nn.Module]) -> type[nn.Module]:
    """Return a class for what is in front of a `source`: with its forward's signature, and with its `model[0]`."""
    if kind.__name__ == f"Parallel{source.__name__}":  # of a copy
        return kind
    methods = {name: _of_source(name) for name in CONTAINER if hasattr(source, name)}
    methods |= {"forward": forward_of(kind, source), "__doc__": kind.__doc__}
    return type(f"Parallel{source.__name__}", (kind,), methods)


def _of_source(name: str):
    return lambda self, *args: getattr(self._source, name)(*args)


class OfSource(nn.Module):
    """A module in front of `source`, with the same submodules. `own`: names of its own attributes; all others that are
    set on it are set on the source."""

    def __init__(self, source: nn.Module, own: tuple[str, ...], tables: tuple[str, ...] = ("_modules",)):
        super().__init__()
        self.__class__ = _class_for(type(self), type(source))
        self.__dict__.update({name: vars(source)[name] for name in tables})
        self.__dict__["_own"] = frozenset({*vars(self), *own})
        self.__dict__["_source"] = source
        show_forward(self)

    @property
    def training(self) -> bool:
        """Return whether the model is in train mode, as its source says."""
        source = self.__dict__.get("_source")
        return True if source is None else source.training

    @training.setter
    def training(self, mode: bool) -> None:
        """Set the mode of the source model, which is the one that counts."""
        if (source := self.__dict__.get("_source")) is not None:
            source.training = mode

    def train(self, mode: bool = True):
        """Set training mode as the source does, whose class may keep some of its layers in eval mode."""
        self._source.train(mode)
        return self

    def _get_name(self) -> str:
        """Return the name of the source's class, which libraries go by and `print` shows."""
        return self._source._get_name()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            source = self.__dict__.get("_source")
            if source is None or (name.startswith("_") and name not in vars(source)):
                raise
            value = getattr(source, name)
        if callable(value) and not isinstance(value, nn.Module) and name not in vars(source):
            return method_of_source(self, source, name, value)
        return value

    def __setattr__(self, name: str, value) -> None:
        source = self.__dict__.get("_source")
        if name == "forward":
            set_forward(self, value)
        elif source is None or name in self._own or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(source, name, value)

    def __delattr__(self, name: str) -> None:
        source = self.__dict__.get("_source")
        if name == "forward":
            delattr(source, name)
            show_forward(self)
        elif source is None or name in vars(self):
            super().__delattr__(name)
        else:
            delattr(source, name)
