"""Arguments of a call that are no tensors, as values that can be compared with those of a later call.

A graph is traced with such an argument as it is at that time. A later call may pass an equal one that was made anew, or
the same object with other values in it: what counts is the value. So an object is taken apart into what pickle would
write of it, and a function into its code and what it closes over.
"""

from __future__ import annotations

import enum
import re
import types
from collections.abc import Iterator, Mapping

import torch

from ..errors import InputError

PLAIN = (bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.memory_format, type,
         types.ModuleType, types.BuiltinFunctionType, enum.Enum, range, slice)  # fmt: skip
DEEPEST = 20
FIX = "pass what it holds as arguments of their own, or register its class with torch.utils._pytree.register_dataclass"


def value_of(value: object, name: str, depth: int = 0) -> object:
    """Return something that is equal for equal arguments. `name` is that of the argument, for errors. Raises InputError
    for one that holds tensors, which would be constants of the graph, or that has no value at all."""
    if isinstance(value, torch.Tensor):
        raise InputError(
            f"{name} is a tensor inside of an object, and would be a constant of the compiled graph", fix=FIX
        )
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, (float, complex)):
        return type(value), repr(value)  # a NaN is equal to itself here
    if depth > DEEPEST:
        raise InputError(f"{name} is nested deeper than {DEEPEST}, or holds itself", fix=FIX)

    def inner(item: object, key: object) -> object:
        return value_of(item, f"{name}.{key}", depth + 1)

    if isinstance(value, Mapping):
        return type(value), tuple((inner(k, "key"), inner(v, k)) for k, v in value.items())
    if isinstance(value, (tuple, list)):
        return type(value), tuple(inner(v, i) for i, v in enumerate(value))
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(inner(v, "item") for v in value)
    if isinstance(value, types.FunctionType):
        cells = [inner(cell.cell_contents, "closure") for cell in value.__closure__ or ()]
        return (
            value.__code__,
            tuple(cells),
            inner(value.__defaults__, "defaults"),
            inner(value.__kwdefaults__, "defaults"),
        )
    if isinstance(value, types.MethodType):
        return inner(value.__func__, "function"), inner(value.__self__, "self")
    if isinstance(value, torch.nn.Module):
        return type(value), id(value)  # its parameters are nobody's constants: tracing says so
    if hasattr(value, "__array_interface__"):  # numpy
        return type(value), value.dtype.str, value.shape, value.tobytes()
    return type(value), _parts(value, name, inner)


def text_of(value: object, depth: int = 0) -> str:
    """Return an argument as text for a message, without addresses, so that it is equal on all ranks where its values
    are."""
    text = repr(value)
    if " at 0x" not in text:
        return text
    attributes = getattr(value, "__dict__", {}) if not isinstance(value, types.FunctionType) else {}
    if attributes and depth < DEEPEST:
        inside = ", ".join(f"{key}={text_of(item, depth + 1)}" for key, item in sorted(attributes.items()))
        return f"{type(value).__name__}({inside})"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def _parts(value: object, name: str, inner) -> object:
    """Return the value of any other object by what pickle would write of it: how it is made, its attributes and its
    items."""
    try:
        made = value.__reduce_ex__(4)
    except Exception as error:
        raise InputError(
            f"{name} is a {type(value).__name__}, whose value cannot be told: every call would be compiled anew",
            fix=FIX,
        ) from error
    if isinstance(made, str):
        return made
    _, arguments, *state = made
    state = [list(part) if isinstance(part, Iterator) else part for part in state[:3]]
    if state and isinstance(state[0], dict):
        state[0] = dict(sorted(state[0].items()))
    return tuple(inner(part, "attributes") for part in (arguments, *state))
