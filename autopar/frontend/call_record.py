"""Record what a forward calls of torch, without values: every function with its arguments, in order.

Two runs with equal records compute the same: what a call does follows from the function, its constants, the forms of
its tensors and the state of torch around it, all of which are recorded. A call that was made before with the same of
these has results of the same forms, so it is not made again: blocks that are like others are recorded in a tenth of the
time that their export takes.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._torch import fake_tensor, fake_twin, is_fake, plain_size, size_of, without_torch_functions
from ..errors import CaptureError

Size = Hashable  # a number, or the expression of one that is open
Source = tuple  # ("leaf", name), ("call", number, position among its results), or ("other", id) of an unknown tensor

_KNOWN = (
    bool, int, str, bytes, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
    type(Ellipsis),
)  # fmt: skip
_ANSWERS = (bool, int, float, str, torch.Size, torch.dtype, torch.device, torch.layout, torch.UntypedStorage)
OF_THE_FORM = frozenset(
    "shape dtype device layout ndim requires_grad size dim stride numel nelement ndimension element_size itemsize "
    "is_contiguous is_floating_point is_complex is_signed is_cpu is_cuda is_meta is_sparse is_quantized is_nested "
    "is_mps is_xpu is_mkldnn is_conj is_neg __len__ _version is_inference untyped_storage".split()
)  # what may be asked of a tensor that no call has made; the last three autopar asks itself, of buffers and outputs


@dataclass(frozen=True)
class Call:
    """A call of a function of torch: `content` is all of it that does not depend on where its tensors come from, which
    `sources` tells, one a tensor."""

    content: tuple
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class _Form:
    """The form of a tensor in the result of a call; `known`: what kind of source a tensor has that was there before."""

    kind: type
    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    known: str | None = None


@dataclass(frozen=True)
class _Result:
    """Describe what equal calls return: tensors of these forms, or (`is_first`) their first argument."""

    forms: tuple[_Form, ...]
    kind: type | None
    is_first: bool = False


class CallRecord(TorchFunctionMode):
    """Inside, calls of torch on tensors of a fake mode are recorded. `leaves`: the tensors that are there before, by
    name; `results`: what is known of the results of calls, by their contents. Objects are told apart by identity; those
    that were met are kept alive for that."""

    def __init__(self, mode, leaves: dict[str, Tensor], results: dict[tuple, _Result]):
        super().__init__()
        self.mode, self.results = mode, results
        self.calls: list[Call] = []
        self._sources: dict[int, Source] = {id(tensor): ("leaf", name) for name, tensor in leaves.items()}
        self._met: list[object] = [*leaves.values()]
        self._made_up: set[int] = set()  # tensors that no call has made
        self._twins: dict[_Form, Tensor] = {}  # with open sizes, one of each form that was made up

    def source(self, tensor: Tensor) -> Source:
        """Return where a tensor comes from."""
        return self._sources.get(id(tensor)) or self._know(tensor, ("other", id(tensor)))

    def _know(self, tensor: Tensor, source: Source) -> Source:
        self._met.append(tensor)
        self._sources[id(tensor)] = source
        return source

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if (function.__self__.__name__ if name == "__get__" else name) in OF_THE_FORM:
            with without_torch_functions():
                return function(*args, **kwargs)
        with without_torch_functions():
            sources: list[Source] = []
            given = self._described((args, kwargs), sources)
            key = function, given, _state(), tuple(map(sources.index, sources))
            if (known := self.results.get(key)) is not None:
                return self._made_again(known, key, sources, args)
            is_made_up = any(id(value) in self._made_up for value in (*args, *kwargs.values()))
        result = function(*args, **kwargs)
        with without_torch_functions():
            forms = tuple(map(self._form, result if isinstance(result, (tuple, list)) else (result,)))
            if not any(isinstance(form, _Form) for form in forms) and is_made_up and result is not None:
                raise CaptureError(f"the forward asks a tensor for its {name}, which it has in a whole run alone")
            if not isinstance(result, _ANSWERS):
                self._note(key, forms, sources, result)
                if (found := _result_of(forms, result, args, given)) is not None:
                    self.results[key] = found
        return result

    def _note(self, key: tuple, forms: tuple, sources: list[Source], result: object) -> None:
        """Record a call, whose results are known from here on."""
        for position, value in enumerate(result if isinstance(result, (tuple, list)) else (result,)):
            if isinstance(value, Tensor) and id(value) not in self._sources:
                self._know(value, ("call", len(self.calls), position))
        self.calls.append(Call((*key, forms), tuple(sources)))

    def _made_again(self, known: _Result, key: tuple, sources: list[Source], args: tuple):
        """Record a call like an earlier one, and return tensors of the same forms."""
        made = args[:1]
        if not known.is_first:
            made = tuple(map(self._made, known.forms))
            self._made_up.update(map(id, made))
        result = made[0] if known.kind is None else known.kind(made)
        self._note(key, known.forms, sources, result)
        return result

    def _made(self, form: _Form) -> Tensor:
        """Return a tensor of a form. Those with open sizes take long to make, so equal ones are in the same memory:
        what is asked of an open run does not depend on that."""
        if form in self._twins:
            return fake_twin(self._twins[form]).requires_grad_(form.requires_grad)
        shape, stride = ([size_of(self.mode, n) for n in sizes] for sizes in (form.shape, form.stride))
        made = fake_tensor(self.mode, shape, stride, 0, form.dtype, form.device)
        if any(type(n) is not int for n in (*form.shape, *form.stride)):
            self._twins[form] = fake_twin(made)
        return made.requires_grad_(form.requires_grad)

    def _form(self, value: object) -> object:
        """Return the form of a part of a result."""
        if not isinstance(value, Tensor):
            return None if value is None else type(value)
        known = self._sources.get(id(value))
        return _form_of(value, None if known is None else known[0])

    def _described(self, value: Any, sources: list[Source]) -> object:
        """Return what is constant in arguments, in a form that compares by type and value."""
        if isinstance(value, Tensor):
            sources.append(self.source(value))
            return _form_of(value)
        kind = type(value)
        if kind in _KNOWN:
            return kind, value
        if kind is torch.SymInt:
            return kind, plain_size(value)
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


def _form_of(tensor: Tensor, known: str | None = None) -> _Form:
    shape, stride = (tuple(map(plain_size, sizes)) for sizes in (tensor.shape, tensor.stride()))
    return _Form(type(tensor), shape, stride, tensor.dtype, tensor.device, tensor.requires_grad, known)


def _result_of(forms: tuple, result: object, args: tuple, given) -> _Result | None:
    """Return what later calls with the same content return, None if they have to be made."""
    if len(args) and result is args[0] and isinstance(result, Tensor):  # written in place, and of the same form
        before = given[1][0][1][0]
        return _Result(forms, None, True) if before == _form_of(result) else None
    kind = type(result) if isinstance(result, (tuple, list)) else None
    is_new = all(isinstance(form, _Form) and form.known is None for form in forms)
    values = result if isinstance(result, (tuple, list)) else (result,)
    is_plain = kind in (None, tuple, list) and len({id(value) for value in values}) == len(values)
    return _Result(forms, kind) if is_new and is_plain and all(map(is_fake, values)) else None


def _state() -> tuple:
    """Return the state of torch that a call's meaning depends on."""
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cpu"),
        torch.get_autocast_dtype("cuda"), torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
