"""Trace loops over experts that a model's own code has: each expert takes the rows that were routed to it.

How many those are is a value. Such a loop compares the numbers of the chosen experts with that of its turn (`chosen
== i`), takes the places where they are equal (`torch.where`, `nonzero`), picks rows there, computes with them and
adds what comes of it to a result (`index_add_`, `result[places] += rows`). Inside of `hand_written_experts` places
and picked rows are stand-ins. What an expert computes is noted, and when the result is next read, the notes of all
experts become one computation of all rows: a row for each chosen expert, in the order of the tokens, with the weights
of its expert, whose products become `autopar::grouped_mm` (passes/canonicalize/experts.py). What experts compute must
be the same but for their weights, and treat rows alike; anything else is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import CaptureError

INTEGERS = (torch.int32, torch.int64)


def refuse(what: str) -> CaptureError:
    """Return the error about a loop over experts that does something a trace cannot follow."""
    return CaptureError(
        f"a loop over experts {what}: how many rows an expert gets is a value, which a trace cannot follow",
        fix="compute rows alike for every expert, and add them to the result where they were picked",
    )


def version_of(tensor: Tensor) -> object:
    """Return what changes when a tensor is written to; never the same where torch does not count that."""
    return object() if tensor.is_inference() else tensor._version


@dataclass(frozen=True, eq=False)
class Chosen:
    """The places at which `of` (tokens..., slots), the numbers of chosen experts, are `expert`; its dims in another
    `order` if it was permuted."""

    of: Tensor
    expert: int
    order: tuple[int, ...]
    any_slot: bool = False  # places of tokens, whichever slot it is

    @property
    def dims(self) -> int:
        """Return of how many dims there are places."""
        return len(self.order)


class Some:
    """A number of rows: all that is known is that there may be some."""

    def __eq__(self, other: object) -> bool:
        return self._compared(other, False)

    def __ne__(self, other: object) -> bool:
        return self._compared(other, True)

    def __gt__(self, other: object) -> bool:
        return self._compared(other, True)

    def __bool__(self) -> bool:
        return True

    def item(self) -> Some:
        """Return the number itself, as a tensor of it would."""
        return self

    __hash__ = object.__hash__

    @staticmethod
    def _compared(other: object, result: bool) -> bool:
        if type(other) is not int or other != 0:
            raise refuse("computes with the number of an expert's rows")
        return result

    def __getattr__(self, name: str):
        raise refuse("computes with the number of an expert's rows")

    def __index__(self) -> int:
        raise refuse("computes with the number of an expert's rows")


class StandIn:
    """Stands for a tensor where functions of torch take one."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise refuse(f"calls {getattr(function, '__name__', function)} outside of the trace")


class Places(StandIn):
    """Stands for what `nonzero` and `where` give: the places along one dim, (places, dims) of all if `dim` is None."""

    def __init__(self, chosen: Chosen, dim: int | None):
        self.chosen, self.dim = chosen, dim

    def __getitem__(self, key: object) -> Places:
        if self.dim is None and isinstance(key, tuple) and len(key) == 2 and key[0] == slice(None):
            if type(key[1]) is int:
                return Places(self.chosen, key[1] % self.chosen.dims)
        if self.dim is not None and key in (None, (slice(None), None), (Ellipsis,), Ellipsis):
            return self
        raise refuse("takes a part of an expert's places")

    def _along_one(self, *_: object) -> Places:
        if self.dim is None and self.chosen.dims == 1:
            return Places(self.chosen, 0)
        if self.dim is None:
            raise refuse("mixes the places along several dims")
        return self

    squeeze = flatten = view = reshape = _along_one

    def unbind(self, dim: int = 0) -> tuple[Places, ...]:
        """Return the places along each dim, where one tensor has those along all."""
        return tuple(Places(self.chosen, d) for d in range(self.chosen.dims)) if dim in (1, -1) else ()

    def numel(self) -> Some:
        """Return the number of places: some."""
        return Some()

    def size(self, dim: int | None = None) -> object:
        """Return the shape, or the size of a dim: some places."""
        return Some() if dim == 0 else self.shape

    def __len__(self) -> int:
        raise refuse("asks for the number of an expert's rows")

    @property
    def shape(self) -> tuple[object, ...]:
        """Return the shape of places along one dim."""
        return (Some(),)


class Note:
    """Keeps what was computed with picked rows: a function with its arguments, some of them rows; or, without a
    function, the rows of a tensor `args[0]` at the places of its first `args[1]` dims. It is computed later, with the
    values that tensors have then."""

    def __init__(self, function: Callable | None, args: tuple, kwargs: dict, item: int | None = None):
        self.function, self.args, self.kwargs, self.item = function, args, kwargs, item
        self.versions = [version_of(tensor) for tensor in self.tensors()]

    def tensors(self) -> list[Tensor]:
        """Return the tensors among the arguments."""
        return [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, Tensor)]

    def is_written_to(self) -> bool:
        """Return whether a tensor among the arguments has got other values since."""
        return self.versions != [version_of(tensor) for tensor in self.tensors()]

    def reads(self) -> Iterator[Tensor]:
        """Iterate over the tensors that it is computed from."""
        yield from self.tensors()
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, Rows):
                yield from value.note.reads()


class Rows(StandIn):
    """A stand-in for rows that an expert picked. `tail`: the shape of a row. `is_shared`: others may be in the same
    memory; `is_written`: they have got other values, which another stand-in has."""

    def __init__(self, chosen: Chosen, note: Note, tail: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        self.chosen, self.note, self.tail, self.dtype, self.device = chosen, note, tail, dtype, device
        self.is_shared = self.is_written = False

    @property
    def shape(self) -> tuple[object, ...]:
        """Return the shape: some rows, then that of a row."""
        return (Some(), *self.tail)

    @property
    def ndim(self) -> int:
        """Return the number of dims."""
        return 1 + len(self.tail)

    def dim(self) -> int:
        """Return the number of dims."""
        return self.ndim

    def size(self, dim: int | None = None) -> object:
        """Return the shape, or the size of a dim."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> Some:
        """Return the number of elements: some."""
        return Some()

    def __getattr__(self, name: str):
        function = getattr(Tensor, name, None)
        if name.startswith("__") or not callable(function):
            raise AttributeError(name)
        return lambda *args, **kwargs: noted(function, (self, *args), kwargs)

    def __getitem__(self, key: object) -> Rows:
        return noted(Tensor.__getitem__, (self, key), {})

    def __neg__(self) -> Rows:
        return noted(torch.neg, (self,), {})


def _operator(function: Callable, is_reverse: bool = False) -> Callable:
    return lambda self, other: noted(function, (other, self) if is_reverse else (self, other), {})


def _in_place(function: Callable) -> Callable:
    def method(self: Rows, other: object) -> Rows:
        if self.is_shared:
            raise refuse("writes to a part of an expert's rows")
        made = noted(function, (self, other), {})
        self.is_written = True  # under other names they are known by still
        return made

    return method


for _name, _function in (
    ("add", torch.add),
    ("sub", torch.sub),
    ("mul", torch.mul),
    ("truediv", torch.div),
    ("pow", torch.pow),
    ("matmul", torch.matmul),
):
    setattr(Rows, f"__{_name}__", _operator(_function))
    setattr(Rows, f"__r{_name}__", _operator(_function, True))
    setattr(Rows, f"__i{_name}__", _in_place(_function))


def picked(tensor: Tensor, chosen: Chosen, dims: int, *rest: object) -> Rows:
    """Return the rows of a tensor at the places of its first dims."""
    rows = Rows(chosen, Note(None, (tensor, dims), {}), tuple(tensor.shape[dims:]), tensor.dtype, tensor.device)
    return rows[(slice(None), *rest)] if rest else rows


POINTWISE = {
    "add", "sub", "mul", "div", "true_divide", "pow", "neg", "exp", "tanh", "sigmoid", "relu", "silu", "gelu", "square",
    "sqrt", "rsqrt", "abs", "clamp", "leaky_relu", "elu", "softplus", "mish", "hardswish", "hardtanh", "relu6",
    "hardsigmoid", "selu", "logsigmoid", "erf", "float", "double", "half", "bfloat16", "to", "type_as", "type",
    "contiguous", "clone", "dropout", "multiply", "divide", "sin", "cos", "log",
}  # fmt: skip
ALIASES = {  # what they give may lie in the memory of what they take
    "unsqueeze", "getitem", "chunk", "split", "contiguous", "dropout", "to", "type", "type_as", "float", "double",
    "half", "bfloat16",
}  # fmt: skip
CASTS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}


def noted(function: Callable, args: tuple, kwargs: dict) -> Any:
    """Note a function of picked rows and return stand-ins for what it makes."""
    rows = [a for a in (*args, *kwargs.values()) if isinstance(a, Rows)]
    first = rows[0]
    if any((r.chosen.of, r.chosen.expert) != (first.chosen.of, first.chosen.expert) for r in rows if r is not first):
        raise refuse("mixes rows of several experts")
    if any(r.is_written for r in rows):
        raise refuse("reads an expert's rows by another name after they were written to")
    name = getattr(function, "__name__", str(function)).removeprefix("__").removesuffix("__")
    if "out" in kwargs or kwargs.get("inplace") or any(a is True for a in args[3 if name == "dropout" else 1 :]):
        raise refuse("writes to an expert's rows")
    note = Note(function, args, kwargs)

    def made(tail: Sequence[int], dtype: torch.dtype = first.dtype, item: int | None = None) -> Rows:
        one = note if item is None else Note(function, args, kwargs, item)
        result = Rows(first.chosen, one, tuple(tail), dtype, first.device)
        if name in ALIASES:
            result.is_shared = first.is_shared = True
        return result

    if function is F.linear:
        return made((*first.tail[:-1], args[1].shape[0]), args[1].dtype)
    if function in (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm) and args[0] is first and len(first.tail) == 1:
        return made((args[1].shape[1],), args[1].dtype)
    if name in ("chunk", "split") and isinstance(args[1], int) and _last(args, kwargs, 2, first):
        width = first.tail[-1]
        size = -(-width // args[1]) if name == "chunk" else args[1]
        parts = [min(size, width - start) for start in range(0, width, size)]
        return tuple(made((*first.tail[:-1], part), item=i) for i, part in enumerate(parts))
    if name in ("softmax", "log_softmax") and _last(args, kwargs, 1, first):
        return made(first.tail)
    if name in ("view", "reshape"):
        shape = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
        if tuple(shape[1:]) == first.tail and (type(shape[0]) is not int or shape[0] == -1):
            return first
    if name == "unsqueeze" and args[1] in (1, -1):
        return made((1, *first.tail) if args[1] == 1 else (*first.tail, 1))
    if name == "getitem" and (new := _new_dims(args[1], first.tail)) is not None:
        return made(new)
    if name in POINTWISE:
        shapes = [r.tail for r in rows] + [tuple(a.shape) for a in args if isinstance(a, Tensor)]
        kinds = [r.dtype for r in rows] + [a.dtype for a in args if isinstance(a, Tensor) and a.dim()]
        dtype = CASTS.get(name)
        if name in ("to", "type"):
            dtype = next((a for a in (*args[1:], *kwargs.values()) if isinstance(a, torch.dtype)), first.dtype)
        elif name == "type_as":
            shapes, dtype = [first.tail], args[1].dtype
        elif dtype is None:
            dtype = kinds[0]
            for kind in kinds[1:]:
                dtype = torch.promote_types(dtype, kind)
        return made(torch.broadcast_shapes(*shapes), dtype)
    raise refuse(f"calls {name} on an expert's rows")


def _new_dims(key: object, tail: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape of a row after an index that adds dims of size 1, and keeps all rows; None for another."""
    whole, *new = key if isinstance(key, tuple) else (key,)
    if any(k is not None for k in new) or whole not in (slice(None), Ellipsis):
        return None
    return (*tail, *(1,) * len(new)) if whole is Ellipsis else (*(1,) * len(new), *tail)


def _last(args: tuple, kwargs: dict, position: int, rows: Rows) -> bool:
    """Return whether a function is along the last dim of rows."""
    dim = kwargs.get("dim", args[position] if len(args) > position else 0)
    return dim in (-1, rows.ndim - 1) and bool(rows.tail)
