"""Values as a flat dict of paths and leaves, copied so that what happens later does not reach them."""

from __future__ import annotations

import dataclasses
import random
import types
from collections import deque
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

INTERNAL = frozenset(vars(nn.Module())) - {"training"}
NUMBERS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, np.generic)
OPAQUE = (nn.Module, type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType,
          torch.utils.hooks.RemovableHandle)  # fmt: skip
DEPTH = 6


def plain(value):
    """A tensor that is whole on this rank; anything else as it is."""
    return value.full_tensor() if isinstance(value, Tensor) and hasattr(value, "full_tensor") else value


def leaves(value, path: str = "", depth: int = 0) -> Iterator[tuple[str, object]]:
    """(path, leaf) of a nested value: tensors and plain values; of a container its type and length too."""
    if isinstance(value, Tensor) or isinstance(value, NUMBERS):
        yield path, value
    elif isinstance(value, np.ndarray):
        yield path, torch.from_numpy(value.copy())
    elif isinstance(value, torch.Generator):
        yield f"{path} state", value.get_state()
    elif isinstance(value, random.Random):
        yield f"{path} state", repr(value.getstate())
    elif depth >= DEPTH or isinstance(value, OPAQUE):
        return
    elif isinstance(value, Mapping):
        yield f"{path} type", f"{type(value).__name__} of {len(value)}"
        for key, item in value.items():
            yield from leaves(item, f"{path}[{key!r}]", depth + 1)
    elif isinstance(value, (list, tuple, deque)):
        yield f"{path} type", f"{type(value).__name__} of {len(value)}"
        for i, item in enumerate(value):
            yield from leaves(item, f"{path}[{i}]", depth + 1)
    elif isinstance(value, (set, frozenset)):
        yield path, repr(sorted(value, key=repr))
    elif dataclasses.is_dataclass(value) or type(value).__module__.partition(".")[0] not in (
        "torch",
        "builtins",
        "functools",
    ):
        for key, item in getattr(value, "__dict__", {}).items():
            yield from leaves(item, f"{path}.{key}", depth + 1)


def copied(leaf):
    """A leaf that nothing changes any more: a whole, dense tensor."""
    if not isinstance(leaf, Tensor):
        return leaf
    if isinstance(leaf, FakeTensor):
        return "a tensor without values, left over from tracing"
    with torch.no_grad(), torch.inference_mode(False):
        whole = plain(leaf.detach())
        return (whole.to_dense() if whole.layout != torch.strided else whole).clone()


def of_output(output) -> dict[str, object]:
    """Return what a user sees of a result: structure, values, and which of them have a gradient."""
    found = {}
    for path, leaf in leaves(output, "output"):
        found[path] = copied(leaf)
        if isinstance(leaf, Tensor):
            found[f"{path} requires_grad"] = leaf.requires_grad
    return found


def of_model(model: nn.Module, source: nn.Module) -> dict[str, object]:
    """Parameters, their gradients, buffers and plain attributes of all modules. `source`: the model that `model` was
    compiled from, or itself; attributes are looked up under the names that either of them has."""
    found: dict[str, object] = {}
    for name, parameter in model.named_parameters():
        found[f"parameter {name}"] = copied(parameter)
        found[f"parameter {name} requires_grad"] = parameter.requires_grad
        gradient = parameter.grad
        found[f"gradient of {name}"] = copied(gradient)
        if gradient is not None:
            found[f"gradient of {name} layout"] = str(plain(gradient).layout)
    for name, buffer in model.named_buffers():
        found[f"buffer {name}"] = copied(buffer)
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, theirs in source.named_modules(remove_duplicate=False):
        found |= _attributes(name, modules.get(name), theirs)
    return found


def _attributes(name: str, module: nn.Module | None, source: nn.Module) -> dict[str, object]:
    found: dict[str, object] = {}
    if module is None:
        return found
    for key in dict.fromkeys((*vars(source), *vars(module))):
        if key in INTERNAL or key.startswith("__"):
            continue
        try:
            value = getattr(module, key)
        except AttributeError:
            continue
        path = f"attribute {name}.{key}" if name else f"attribute {key}"
        found |= {p: copied(leaf) for p, leaf in leaves(value, path) if not isinstance(leaf, nn.Parameter)}
    return found
