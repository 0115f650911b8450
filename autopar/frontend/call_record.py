"""Record what a forward calls of torch, without values: every function with its arguments, in order.

Two runs with equal records compute the same: what a call does follows from the function, its constants, the forms of
its tensors and the state of torch around it, all of which are recorded. Recording takes a tenth of the time of an
export.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._torch import without_torch_functions

Source = tuple  # ("leaf", name), ("call", number, position among its results), or ("other", id) of an unknown tensor

_KNOWN = (
    bool, int, str, bytes, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
    type(Ellipsis),
)  # fmt: skip
_ANSWERS = (bool, int, float, str, torch.Size, torch.dtype, torch.device, torch.layout, torch.UntypedStorage)


@dataclass(frozen=True)
class Call:
    """A call of a function of torch: `content` is all of it that does not depend on where its tensors come from, which
    `sources` tells, one a tensor."""

    content: tuple
    sources: tuple[Source, ...]


class CallRecord(TorchFunctionMode):
    """Inside, calls of torch are recorded. `leaves`: the names of the tensors that are there before, by id. Objects are
    told apart by identity; those that were met are kept alive for that."""

    def __init__(self, leaves: Mapping[int, str]):
        super().__init__()
        self.calls: list[Call] = []
        self._sources: dict[int, Source] = {number: ("leaf", name) for number, name in leaves.items()}
        self._met: list[object] = []

    def source(self, tensor: Tensor) -> Source:
        """Return where a tensor comes from."""
        found = self._sources.get(id(tensor))
        if found is None:
            self._met.append(tensor)
            found = self._sources[id(tensor)] = ("other", id(tensor))
        return found

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with without_torch_functions():
            sources: list[Source] = []
            state, given = _state(), self._described((args, kwargs), sources)
        result = function(*args, **kwargs)
        if isinstance(result, _ANSWERS):
            return result
        with without_torch_functions():
            self.calls.append(Call((function, given, state, self._made(result)), tuple(sources)))
        return result

    def _made(self, result: object) -> tuple:
        """Return the forms of the tensors in a result, which are known from here on."""
        made = []
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if not isinstance(tensor, Tensor):
                made.append(None if tensor is None else type(tensor))
                continue
            if id(tensor) not in self._sources:
                self._met.append(tensor)
                self._sources[id(tensor)] = ("call", len(self.calls), len(made))
                written = None
            else:
                written = self._sources[id(tensor)][0]
            form = type(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad
            made.append((*form, written))
        return tuple(made)

    def _described(self, value: object, sources: list[Source]) -> object:
        """Return what is constant in arguments, in a form that compares by type and value."""
        if isinstance(value, Tensor):
            sources.append(self.source(value))
            return Tensor, tuple(value.shape), value.stride(), value.dtype, value.requires_grad
        kind = type(value)
        if kind in _KNOWN:
            return kind, value
        if kind is float:
            return kind, value.hex()  # -0.0 is not 0.0, and nan is nan
        if kind in (tuple, list, torch.Size):
            return kind, tuple([self._described(item, sources) for item in value])
        if kind is dict:
            return kind, tuple([(key, self._described(item, sources)) for key, item in value.items()])
        if kind is slice:
            return kind, self._described((value.start, value.stop, value.step), sources)
        self._met.append(value)
        return kind, id(value)


def _state() -> tuple:
    """Return the state of torch that a call's meaning depends on."""
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cpu"),
        torch.get_autocast_dtype("cuda"), torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
