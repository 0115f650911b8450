"""Values of Python and torch as what JSON can hold, and back.

Numbers, texts and lists are themselves; every other kind of value is an object with one key, the name of its kind. What
is none of these is the caller's: `encode` asks it for such an object, and `decode` gives it the kind and the content.
Nothing that is read makes code run or imports a module.
"""

from __future__ import annotations

import enum
import math
import sys
from collections.abc import Callable
from typing import Any

import torch


class NotPortable(Exception):
    """A value that has no form as plain data, or data that has no meaning here."""


def _refused(value: object) -> Any:
    raise NotPortable(f"a {type(value).__name__}")


def _unknown(kind: str, content: Any) -> Any:
    raise NotPortable(f"a value of kind {kind}")


def encode(value: object, other: Callable[[Any], Any] = _refused) -> Any:
    """Return a value as plain data. `other` does so for values of other kinds; raises NotPortable if it cannot."""
    if value is None or type(value) in (bool, int, str):
        return value
    kind: Any = type(value)
    found: Any = value
    if kind is float:
        return value if math.isfinite(found) else {"float": repr(value)}
    if kind is list:
        return [encode(item, other) for item in found]
    if kind is tuple:
        return {"tuple": [encode(item, other) for item in found]}
    if kind is dict:
        return {"dict": [[encode(key, other), encode(item, other)] for key, item in found.items()]}
    if kind is torch.Size:
        return {"size": list(found)}
    if kind is slice:
        return {"slice": [encode(item, other) for item in (found.start, found.stop, found.step)]}
    if kind is range:
        return {"range": [found.start, found.stop, found.step]}
    if kind is complex:
        return {"complex": [repr(found.real), repr(found.imag)]}
    if kind is bytes:
        return {"bytes": found.hex()}
    if kind in (torch.dtype, torch.memory_format, torch.layout):
        return {"torch": str(found).removeprefix("torch.")}
    if kind is torch.device:
        return {"device": str(found)}
    if value is Ellipsis:
        return {"ellipsis": 0}
    if isinstance(value, enum.Enum):
        return {"enum": [*name_of(kind), found.name]}
    return other(value)


def decode(data: Any, other: Callable[[str, Any], Any] = _unknown) -> Any:
    """Return the value that `encode` gave as data. Raises NotPortable for what it never gives."""
    if isinstance(data, list):
        return [decode(item, other) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        raise NotPortable(f"an object with {len(data)} keys")
    ((kind, content),) = data.items()
    if kind == "tuple":
        return tuple([decode(item, other) for item in content])
    if kind == "dict":
        return {decode(key, other): decode(item, other) for key, item in content}
    if kind == "size":
        return torch.Size(content)
    if kind == "slice":
        return slice(*(decode(item, other) for item in content))
    if kind == "range":
        return range(*content)
    if kind == "float":
        return float(content)
    if kind == "complex":
        return complex(float(content[0]), float(content[1]))
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "torch":
        return _of_torch(content)
    if kind == "device":
        return torch.device(content)
    if kind == "ellipsis":
        return ...
    if kind == "enum":
        cls = named(*content[:2])
        if not (isinstance(cls, type) and issubclass(cls, enum.Enum)):
            raise NotPortable(f"{content[1]}, which is no enum")
        return cls[content[2]]
    return other(kind, content)


def name_of(value: Any) -> list[str]:
    """Return the module and the qualified name of a class or function. Raises NotPortable if another thing is there."""
    found = [getattr(value, "__module__", None) or "", getattr(value, "__qualname__", "")]
    if named(*found) is not value:
        raise NotPortable(f"{'.'.join(found)}, which is not where its name says")
    return found


def named(module: str, name: str) -> Any:
    """Return what has a qualified name in a module that is imported. Raises NotPortable if nothing has."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise NotPortable(f"{module}.{name}, which is not there")
    return found


def _of_torch(name: str) -> Any:
    found = getattr(torch, name, None)
    if not isinstance(found, (torch.dtype, torch.memory_format, torch.layout)):
        raise NotPortable(f"torch.{name}")
    return found
