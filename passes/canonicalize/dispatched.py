"""Record what torch's dispatcher makes of one op: the calls that arrive at kernels, after autocast has cast and
composite ops are taken apart; and what autocast has done to it, read off these calls.

Arguments are stand-ins that look like tensors of some device type; the device itself need not be there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from ..._torch import schema_names
from ..._torch.regions import no_autocast, stand_in
from ...frontend.autocast import entered
from ...frontend.fake_parameters import DEVICE
from ...ir.graph import flatten

aten = torch.ops.aten
map_leaves = fx.node.map_aggregate


@dataclass(frozen=True)
class DispatchedCall:
    """One call of a kernel; tensors among its arguments and results are stand-ins."""

    target: Callable
    args: tuple
    kwargs: dict
    result: object

    @property
    def summary(self) -> tuple:
        """Return what tells two calls apart, except for which tensors they get."""
        return self.target, str(map_leaves((self.args, self.kwargs, self.result), _form))


def _form(value: object):
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value


@dataclass
class Recorder:
    """Runs ops on stand-ins and keeps the calls."""

    device: str
    calls: list[DispatchedCall] = field(default_factory=list)
    known: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def stand_in(self, value: object):
        """Return the stand-in of a tensor, the same one for the same tensor; anything else as it is."""
        if not isinstance(value, Tensor):
            return value
        found = next((outer for inner, outer in self.known if inner is value), None)
        if found is None:
            found = stand_in(value, self.device, self._arrived)
            self.known.append((value, found))
        return found

    def plain(self, value: object):
        """Return a value with the tensors themselves for stand-ins, and with the device that graphs are traced on for
        theirs."""
        inner = {id(outer): tensor for tensor, outer in self.known}
        return map_leaves(value, lambda x: DEVICE if isinstance(x, torch.device) else inner.get(id(x), x))

    def run(self, target: Callable, args, kwargs, dtype: torch.dtype | None) -> tuple[list[DispatchedCall], object]:
        """Return (calls that an op makes, its result); under autocast to `dtype`, if that is not None."""
        args, kwargs = map_leaves((tuple(args), dict(kwargs)), self.stand_in)
        self.calls = []
        with torch.no_grad(), entered(((self.device, dtype),) if dtype is not None else ()):
            result = target(*args, **kwargs)
        return self.calls, result

    def _arrived(self, target: Callable, args, kwargs):
        """Run and record an op that arrives at a stand-in."""
        with no_autocast():
            result = target(*self.plain(tuple(args)), **self.plain(dict(kwargs)))
        result = map_leaves(result, self.stand_in)
        self.calls.append(DispatchedCall(target, args, kwargs, result))
        return result


@dataclass(frozen=True)
class Way:
    """The form of an op under autocast: types that its tensor arguments are cast to (None: not cast) and the `dtype`
    that it is told, or as the calls that it is made of. `types`: of its results, () if they were not seen."""

    casts: tuple[torch.dtype | None, ...] = ()
    dtype: torch.dtype | None = None
    is_taken_apart: bool = False
    types: tuple[torch.dtype, ...] = ()


def way_of(target, args, kwargs: Mapping, dtype: torch.dtype, device: str) -> Way:
    """Return the way of an op with these arguments under autocast to `dtype` on a type of device."""
    recorder, tensors = Recorder(device), _tensors((tuple(args), dict(kwargs)))
    try:
        calls, result = recorder.run(target, args, kwargs, dtype)
    except RuntimeError:  # some composite ops ask for the device itself when autocast tells them a type
        return _wide(target, args, kwargs, tensors)
    types = tuple(t.dtype for t in _tensors(result))
    casts: dict[int, torch.dtype] = {}
    origin = {id(recorder.stand_in(t)): id(t) for t in tensors}
    for call in calls:
        if call.target is not aten._to_copy.default or id(call.args[0]) not in origin:
            break
        casts[origin[id(call.args[0])]] = call.result.dtype
    types_given = (None, torch.float32) if _takes_type(target, args, kwargs) else (None,)
    for cast, type_ in [({}, None), *((casts, t) for t in types_given)]:
        given = map_leaves((tuple(args), dict(kwargs)), lambda x, c=cast: x.to(c[id(x)]) if id(x) in c else x)
        options = given[1] if type_ is None else {**given[1], "dtype": type_}
        if _alone(target, given[0], options, device) == [call.summary for call in calls[len(cast) :]]:
            return Way(tuple(cast.get(id(t)) for t in tensors), type_, types=types)
    return Way(is_taken_apart=True, types=types)


def _alone(target, args, kwargs, device: str) -> list[tuple] | None:
    """Return summaries of the calls that an op makes without autocast, None if it does not take such arguments."""
    try:
        calls, _ = Recorder(device).run(target, args, kwargs, None)
    except RuntimeError:
        return None
    return [call.summary for call in calls]


def _tensors(value: object) -> list[Tensor]:
    return [x for x in flatten(value) if isinstance(x, Tensor)]


def _wide(target, args, kwargs, tensors: list[Tensor]) -> Way:
    """Return the way of an op that computes in float32."""
    if _takes_type(target, args, kwargs):
        return Way((None,) * len(tensors), torch.float32)
    return Way(tuple(torch.float32 if t.is_floating_point() and t.dtype.itemsize < 4 else None for t in tensors))


def _takes_type(target, args, kwargs) -> bool:
    names = schema_names(target)
    return "dtype" in names and kwargs.get("dtype") is None and names.index("dtype") >= len(args)
