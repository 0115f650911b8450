"""What torch's dispatcher makes of one op: the calls that arrive at kernels, after autocast has cast and composite ops are taken
apart.

Arguments are stand-ins that look like tensors of some device type; the device itself need not be there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .._torch import no_autocast, stand_in, tree_map
from ..fake_state import DEVICE

aten = torch.ops.aten


@dataclass(frozen=True)
class Call:
    """One call of a kernel; tensors among its arguments and results are stand-ins."""

    target: Callable
    args: tuple
    kwargs: dict
    result: object

    @property
    def summary(self) -> tuple:
        """What tells two calls apart, except for which tensors they get."""
        return self.target, str(tree_map(_form, (self.args, self.kwargs))), str(tree_map(_form, self.result))


def _form(value: object):
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value


@dataclass
class Recorder:
    """Runs ops on stand-ins and keeps the calls."""

    device: str
    calls: list[Call] = field(default_factory=list)
    known: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def stand_in(self, value: Tensor) -> Tensor:
        """The stand-in of a fake tensor, the same one for the same tensor."""
        found = next((outer for inner, outer in self.known if inner is value), None)
        if found is None:
            found = stand_in(value, self.device, self._run)
            self.known.append((value, found))
        return found

    def plain(self, value: object):
        """A value with the tensors themselves for stand-ins, and no word of their device."""
        inner = {id(outer): tensor for tensor, outer in self.known}
        return tree_map(lambda x: DEVICE if isinstance(x, torch.device) else inner.get(id(x), x), value)

    def run(self, target: Callable, args, kwargs) -> tuple[list[Call], object]:
        """(calls that an op makes of arguments in which tensors are stand-ins, its result)."""
        self.calls = []
        with torch.no_grad():
            result = target(*args, **kwargs)
        return self.calls, result

    def _run(self, target: Callable, args, kwargs):
        """What a stand-in does when an op arrives at it."""
        with no_autocast():
            result = target(*self.plain(args), **self.plain(kwargs))
        result = tree_map(lambda x: self.stand_in(x) if isinstance(x, Tensor) else x, result)
        self.calls.append(Call(target, args, kwargs, result))
        return result
