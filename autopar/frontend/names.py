"""Find the global names and closed-over values that a forward can reach, in its bytecode.

A global that a function reads cannot be watched while it runs, so the functions that a forward can reach by name are
followed, as far as they are the user's own: what installed libraries keep in their globals does not change between two
calls.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import nn

_LIBRARIES = tuple(
    {os.path.realpath(sysconfig.get_path(key)) + os.sep for key in ("stdlib", "platstdlib", "purelib", "platlib")}
)


@dataclass(frozen=True)
class Names:
    """List what a function's code mentions, with functions inside of it: global names that it reads and writes, and
    the names of attributes that it reads."""

    read: frozenset[str]
    written: frozenset[str]
    attributes: frozenset[str]


@functools.lru_cache(4096)
def names_in(code: types.CodeType) -> Names:
    """Return the names in a code object."""
    read, written, attributes = set(), set(), set()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            read.add(step.argval)
        elif step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            written.add(step.argval)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(step.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = names_in(constant)
            read, written, attributes = read | inner.read, written | inner.written, attributes | inner.attributes
    return Names(frozenset(read), frozenset(written), frozenset(attributes))


@functools.lru_cache(4096)
def is_library(module: str | None) -> bool:
    """Return whether a module, by its name, belongs to Python, to an installed package or to autopar."""
    if not module or module == "__main__":
        return False
    root = module.split(".")[0]
    if root in sys.stdlib_module_names or root in ("torch", "numpy", "transformers", "autopar"):
        return True
    found = sys.modules.get(module)
    file = getattr(found, "__file__", None) or next(iter(getattr(found, "__path__", ())), None)  # of a namespace
    if file is None:
        return False
    path = os.path.realpath(file)
    return path.startswith(_LIBRARIES) or "site-packages" in path


@dataclass(frozen=True)
class Variable:
    """A value that a function reaches by name: `table[key]` of a dict of globals, or the contents of a cell."""

    table: dict | types.CellType
    key: str
    path: str

    def value(self, default: object = None) -> object:
        """Return what is there now."""
        if isinstance(self.table, types.CellType):
            try:
                return self.table.cell_contents
            except ValueError:  # an empty cell
                return default
        return self.table.get(self.key, default)

    def clear(self) -> None:
        """Leave nothing there."""
        if isinstance(self.table, types.CellType):
            del self.table.cell_contents
        else:
            self.table.pop(self.key, None)

    def set(self, value: object) -> None:
        """Put another value there."""
        if isinstance(self.table, types.CellType):
            self.table.cell_contents = value
        else:
            self.table[self.key] = value


class Reach:
    """Follows functions from the ones that are called. `variables` are the values that they reach, each once,
    `functions` themselves, by their code."""

    def __init__(self, methods: Iterable[type]):
        self.classes = [c for c in methods if not is_library(c.__module__)]
        self.variables: dict[tuple[int, str], Variable] = {}
        self.functions: dict[types.CodeType, types.FunctionType] = {}
        self._attributes: set[str] = set()

    def follow(self, function: object) -> Iterator[Variable]:
        """Yield the variables that a function newly reaches, with those of the functions that it names."""
        waiting = [function]
        while waiting:
            found = _function_of(waiting.pop())
            if found is None or found.__code__ in self.functions or is_library(found.__module__):
                continue
            self.functions[found.__code__] = found
            names = names_in(found.__code__)
            module = sys.modules.get(found.__module__ or "")
            label = getattr(module, "__name__", "globals")
            reached = [
                Variable(found.__globals__, name, f"{label}.{name}")
                for name in sorted(names.read | names.written)
                if name in found.__globals__
            ]
            reached += [
                Variable(cell, name, f"{name} of {found.__qualname__}")
                for name, cell in zip(found.__code__.co_freevars, found.__closure__ or ())
            ]
            for variable in list(reached):
                value = variable.value()
                if isinstance(value, types.ModuleType) and not is_library(value.__name__):
                    reached += [
                        Variable(vars(value), name, f"{value.__name__}.{name}")
                        for name in sorted(names.attributes)
                        if name in vars(value)
                    ]
            for variable in reached:
                key = id(variable.table), variable.key
                if key not in self.variables:
                    self.variables[key] = variable
                    value = variable.value()
                    if _function_of(value) is not None:
                        waiting.append(value)
                    elif isinstance(value, type):
                        waiting += [] if is_library(value.__module__) else _functions_in(value, None)
                    else:
                        yield variable
            new = names.attributes - self._attributes
            self._attributes |= new
            for cls in self.classes:
                waiting += _functions_in(cls, new)


def _functions_in(cls: type, names: Iterable[str] | None) -> list[object]:
    """Return the functions of a class, and of its bases outside of libraries, that have one of these names, or all if
    `names` is None."""
    found = []
    for base in cls.__mro__:
        if not is_library(base.__module__):
            wanted = vars(base) if names is None else [name for name in names if name in vars(base)]
            found += [vars(base)[name] for name in wanted]
    return found


def _function_of(value: object) -> types.FunctionType | None:
    """Return the Python function behind a method, a property or a partial, None if there is none."""
    for _ in range(8):
        if isinstance(value, types.FunctionType):
            return value
        if isinstance(value, (types.MethodType, staticmethod, classmethod)):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, functools.partial):
            value = value.func
        else:
            return None
    return None


def called_by(model: nn.Module, loss_fn: Callable | None) -> list[object]:
    """Return the functions that a call of the model runs by itself: forwards, hooks and the loss."""
    found: list[object] = [loss_fn]
    for module in model.modules():
        found.append(vars(module).get("forward", type(module).forward))
        found += [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return found
