"""Python floats among the arguments of a call that change from call to call: inputs of the graph, not constants of it.

While the model is traced such an argument is a `TracedNumber`: a float for whoever asks, and beside tensors a tensor
without dims of type float64. That is what torch makes of a Python number too: tensors with dims keep their type beside
it, and kernels take it in the type that they compute in. Plus, minus, times and division, of tensors and of numbers,
go into the graph, with the bits of Python's own arithmetic. Everything else (a comparison, math.sqrt, an argument that
is a number for torch, such as a dropout's p) reads the value: then the argument is a constant, and the call is traced
again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._torch import tree_flatten, tree_map, tree_unflatten


@dataclass(frozen=True)
class OpenNumber:
    """A float in the place of an argument that may have any value. `value`: that of the call at hand."""

    value: float

    def tensor(self) -> Tensor:
        """Return the number as a tensor without dims."""
        return torch.tensor(self.value, dtype=torch.float64)


def closed(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Return a call with plain floats in the place of open numbers."""
    return tree_map(lambda x: x.value if isinstance(x, OpenNumber) else x, (args, kwargs))


def opened(args: tuple, kwargs: dict, names: Collection[str], leaf_names: list[str]) -> tuple[tuple, dict]:
    """Return a call in which the floats of these names are open. `leaf_names`: of all its leaves."""
    if not names:
        return args, kwargs
    leaves, spec = tree_flatten((args, kwargs))
    found = [OpenNumber(x) if n in names and type(x) is float else x for n, x in zip(leaf_names, leaves)]
    return tree_unflatten(found, spec)


def _callables(names: str) -> set[Callable]:
    return {getattr(where, name) for name in names.split() for where in (torch, Tensor) if hasattr(where, name)}


_ARITHMETIC = _callables("mul multiply add sub subtract div divide true_divide rsub __rsub__ __rdiv__ __rtruediv__")
_WRITING = _callables("mul_ multiply_ add_ sub_ subtract_ div_ divide_ true_divide_")
_TAKING = _callables("where masked_fill masked_fill_ gt ge lt le greater greater_equal less less_equal")


class TracedNumber:
    """An open number while a call is traced. `tensor`: what it is in the graph; `read`: called if it is read."""

    def __init__(self, value: float, tensor: Tensor, read: Callable[[], None]):
        self._value, self._tensor, self._read = value, tensor, read

    @property  # type: ignore[misc]
    def __class__(self):  # isinstance(number, float)
        return float

    def __float__(self) -> float:
        self._read()
        return self._value

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not kwargs and (taken := _as_tensors(func, args)) is not None:
            return taken
        args, kwargs = tree_map(plain, (args, kwargs))
        return func(*args, **kwargs)

    def _with(self, other: object, value: Callable, tensor: Callable) -> Any:
        """Return a number computed from this one and another Python number."""
        if type(other) is TracedNumber:
            return TracedNumber(value(self._value, other._value), tensor(self._tensor, other._tensor), self._read)
        if type(other) not in (int, float):
            return NotImplemented if isinstance(other, (Tensor, complex)) else value(float(self), other)
        # whole, so that torch has no number to take apart: 2 / t is not 2 * (1 / t)
        whole = self._tensor.new_full((), float(other))  # type: ignore[arg-type]
        return TracedNumber(value(self._value, other), tensor(self._tensor, whole), self._read)

    def __add__(self, other):
        return self._with(other, lambda a, b: a + b, torch.add)

    def __radd__(self, other):
        return self._with(other, lambda a, b: b + a, torch.add)

    def __sub__(self, other):
        return self._with(other, lambda a, b: a - b, torch.sub)

    def __rsub__(self, other):
        return self._with(other, lambda a, b: b - a, lambda a, b: torch.sub(b, a))

    def __mul__(self, other):
        return self._with(other, lambda a, b: a * b, torch.mul)

    def __rmul__(self, other):
        return self._with(other, lambda a, b: b * a, torch.mul)

    def __truediv__(self, other):  # by a number that changes, Python raises where torch gives an infinity
        other = plain(other)
        return self._with(other, lambda a, b: a / b, torch.div)

    def __rtruediv__(self, other):
        return other / float(self)

    def __neg__(self):
        return TracedNumber(-self._value, torch.neg(self._tensor), self._read)

    def __pos__(self):
        return self

    def __getattr__(self, name: str):
        return getattr(float(self), name)

    def __reduce_ex__(self, protocol):
        return float, (float(self),)


def _reading(name: str) -> Callable:
    return lambda self, *others: getattr(float, name)(float(self), *map(plain, others))


for (
    _name
) in """__lt__ __le__ __gt__ __ge__ __eq__ __ne__ __bool__ __int__ __hash__ __round__ __trunc__ __floor__ __ceil__
    __abs__ __pow__ __rpow__ __mod__ __rmod__ __floordiv__ __rfloordiv__ __divmod__ __rdivmod__ __repr__ __str__
    __format__""".split():
    setattr(TracedNumber, _name, _reading(_name))


def plain(value: object) -> Any:
    """Return a traced number's value, which is read thereby, and anything else as it is."""
    return float(value) if type(value) is TracedNumber else value


def _as_tensors(func: Callable, args: tuple) -> Any:
    """Return what an op gives with tensors in the place of numbers, None where it would give something else than with
    the numbers themselves."""
    tensors = [x for x in args if isinstance(x, Tensor)]
    numbers = [x for x in args if type(x) is TracedNumber]
    if len(tensors) + len(numbers) != len(args) or not numbers or not tensors:
        return None
    beside = [x for x in tensors if x.dtype != torch.bool or func not in _TAKING]
    has_dims = all(x.dim() > 0 for x in beside)
    is_float = all(x.is_floating_point() for x in beside)
    if func in _TAKING:
        return _call(func, args) if has_dims and is_float and len(numbers) == 1 else None
    if func not in _ARITHMETIC | _WRITING or len(args) != 2:
        return None
    if has_dims and is_float:
        return _call(func, args)
    (x,) = tensors
    if func in _WRITING:
        return None
    if is_float:  # without dims: the op computes in its own type, or in float32 where that is narrower
        wide = torch.promote_types(x.dtype, torch.float32)
        return _call(func, [y.to(wide) if y is x else y for y in args], wide).to(x.dtype)
    if has_dims and not x.is_complex():  # whole numbers: torch takes both in its default type
        return _call(func, [y.to(torch.get_default_dtype()) if y is x else y for y in args])
    return None


def _call(func: Callable, args, dtype: torch.dtype | None = None) -> Any:
    tensors = [x._tensor if type(x) is TracedNumber else x for x in args]
    return func(*[t.to(dtype) if dtype is not None and t.dtype != dtype else t for t in tensors])
