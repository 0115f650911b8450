"""Describe a value of a user's Python as plain data that is equal in two processes if it is the same to a forward.

Plain values say what they are, containers what they hold, tensors their form (and a hash of their values, where a graph
has them), functions their code. An object whose reads are watched (see reads.py) is the number under which it is known.
"""

from __future__ import annotations

import hashlib
import re
import types
from collections.abc import Iterable
from typing import Any

import torch

from ..utils.plain_data import NotPortable
from .reads import Reads, identity
from .snapshot import MISSING, PLAIN, Snapshot

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def described(snapshot: Snapshot, reads: Reads) -> Any:
    """Return what the value of a snapshot is. Raises NotPortable for an object that does not say."""
    value: Any = snapshot.value
    if snapshot.items is not None:
        return [class_of(value), *([_key(key), described(item, reads)] for key, item in snapshot.items)]
    if snapshot.form is not None:
        return form_of(value)
    if value is MISSING:
        return "missing"
    if isinstance(value, PLAIN):
        return [class_of(value), repr(value)]
    if identity(value) in reads.known:
        return reads.known[identity(value)][2]
    if isinstance(value, torch.Tensor):
        return [*form_of(value), _hash(value)]
    if isinstance(value, (type, types.BuiltinFunctionType)):
        return ["name", value.__module__, value.__qualname__]
    if isinstance(value, types.ModuleType):
        return ["module", value.__name__]
    if hasattr(value, "__array_interface__"):  # numpy
        return ["array", str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
    if isinstance(value, types.FunctionType):
        return ["code", code_hash([value])]
    text = repr(value)
    if _ADDRESS.search(text) and not isinstance(value, torch.nn.Module):
        raise NotPortable(f"{text:.80}")
    return [class_of(value), _ADDRESS.sub("", text)]


def fits(snapshot: Snapshot, description: Any, reads: Reads) -> bool:
    """Return whether a value is as a description says; its tensors then count by their form where those do."""
    if snapshot.items is not None:
        if not isinstance(description, list) or len(description) != len(snapshot.items) + 1:
            return False
        keys = [class_of(snapshot.value), *(_key(key) for key, _ in snapshot.items)]
        if keys != [description[0], *(entry[0] for entry in description[1:])]:
            return False
        return all(fits(item, entry[1], reads) for (_, item), entry in zip(snapshot.items, description[1:]))
    if isinstance(snapshot.value, torch.Tensor) and form_of(snapshot.value) == description:
        snapshot.forget_values(())
        return True
    return described(snapshot, reads) == description


def form_of(tensor: torch.Tensor) -> list:
    """Return what Python sees of a tensor, but for its device."""
    return ["form", list(tensor.shape), str(tensor.dtype), tensor.requires_grad]


def code_hash(functions: Iterable[types.FunctionType]) -> str:
    """Return a hash of functions' code and defaults, in whatever order."""
    found = [f"{_code_hash(f.__code__)} {_text(f.__defaults__)} {_text(f.__kwdefaults__)}" for f in functions]
    return hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()


def _code_hash(code: types.CodeType) -> str:
    constants = [
        _code_hash(c)
        if isinstance(c, types.CodeType)
        else sorted(map(repr, c))
        if isinstance(c, frozenset)
        else repr(c)
        for c in code.co_consts
    ]
    parts = code.co_qualname, code.co_firstlineno, code.co_code.hex(), code.co_names, code.co_varnames, constants
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _text(value: object) -> str:
    return _ADDRESS.sub("", repr(value))


def class_of(value: object) -> str:
    """Return the full name of a value's class."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _key(key: object) -> Any:
    return _text(key)


def _hash(tensor: torch.Tensor) -> str:
    if tensor.is_meta or tensor.layout is not torch.strided or hasattr(tensor, "full_tensor"):
        raise NotPortable("a tensor whose values cannot be read")
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()
