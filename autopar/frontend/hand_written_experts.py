"""The mode in which loops over experts are traced as one computation: see picked_rows.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .._torch import storage_key
from .grouped_rows import Grouped
from .picked_rows import INTEGERS, Chosen, Places, Rows, Some, noted, picked, refuse, version_of

T = TypeVar("T")
ROUTES = {"topk": 1, "argmax": None, "max": 1, "sort": 1, "argsort": None}  # where their indices are
SAME_NUMBERS = {"view", "reshape", "flatten", "squeeze", "to", "long", "int", "contiguous", "detach", "clone"}


class Known(Generic[T]):
    """Holds what is known of tensors, each until it is written to."""

    def __init__(self) -> None:
        self.entries: dict[int, tuple[Tensor, object, T]] = {}

    def __setitem__(self, tensor: Tensor, value: T) -> None:
        self.entries[id(tensor)] = tensor, version_of(tensor), value

    def get(self, tensor: object) -> T | None:
        """Return what is known of a tensor, None of another value."""
        of, version, value = self.entries.get(id(tensor), (None, None, None))
        return value if of is not None and version_of(of) == version else None

    def __bool__(self) -> bool:
        return bool(self.entries)


@dataclass
class Routed:
    """Says of numbers of chosen experts that there are so many `classes`, and whether those along the last dim are
    `distinct`."""

    classes: int
    distinct: bool


@dataclass
class Result:
    """A tensor to which rows are to be added, or in which they are set, at the places of its first `dims`; by the
    numbers that they were chosen by, for each expert."""

    tensor: Tensor
    dims: int
    is_set: bool
    rows: dict[int, tuple[Tensor, dict[int, Rows]]] = field(default_factory=dict)


class hand_written_experts(TorchFunctionMode):  # noqa: N801  (a context manager)
    """Inside, rows that experts pick are noted and computed together."""

    def __init__(self) -> None:
        super().__init__()
        self.routed: Known[Routed] = Known()
        self.masks: Known[Chosen] = Known()
        self.one_hot: Known[tuple[Tensor, tuple[int, ...]]] = Known()  # of which numbers, and the order of their dims
        self.selected: Known[tuple[Tensor, int]] = Known()  # a part of which tensor, and which along dim 0
        self.results: dict[object, dict[int, Result]] = {}  # by memory, as one may be read through another view

    def __exit__(self, kind, error, trace):
        super().__exit__(kind, error, trace)
        if self.results and kind is None:
            raise refuse("ends with a result that no function reads")

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "").removeprefix("__").removesuffix("__").removesuffix("_")
        if (self.routed or self.results) and name != "get":  # which asks for an attribute
            found = self._of_loop(function, name, args, kwargs)
            if found is not NotImplemented:
                return found
            for value in _tensors((args, kwargs)) if self.results else ():
                for result in self.results.pop(storage_key(value), {}).values():
                    self._settle(result)
        made = function(*args, **kwargs)
        self._remember(function, name, args, kwargs, made)
        return made

    def _of_loop(self, function: Callable, name: str, args: tuple, kwargs: dict):
        """Return what a function of places or picked rows gives; NotImplemented for any other."""
        first = args[0] if args else None
        chosen = self.masks.get(first)
        if chosen is not None and not kwargs.keys() - {"as_tuple"} and len(args) == 1:
            if name in ("where", "nonzero", "argwhere"):
                if name == "where" or kwargs.get("as_tuple"):
                    return tuple(Places(chosen, d) for d in range(chosen.dims))
                return Places(chosen, None)
            if name == "any":
                return Some()
        if name == "getitem" and isinstance(first, Tensor):
            if (at := self._places(first, args[1])) is not None:
                chosen, dims, rest = at
                return picked(first, chosen, dims, *rest)
        if name == "setitem" and isinstance(first, Tensor):
            if (at := self._places(first, args[1])) is not None:
                return self._set(first, *at, args[2])
        if function is Tensor.index_add_ and len(args) == 4 and isinstance(first, Tensor) and isinstance(args[3], Rows):
            if args[1] == 0 and isinstance(args[2], Places) and not kwargs:
                if (at := self._places(first, args[2])) is not None:
                    return self._add(first, at[0], at[1], args[3], False)
        values = [*args, *kwargs.values()]
        if any(isinstance(v, Rows) for v in values):
            if any(isinstance(v, Places) for v in values):
                raise refuse(f"calls {name} on an expert's rows")
            return noted(function, args, kwargs)
        if any(isinstance(v, Places | Some) for v in values):
            raise refuse(f"calls {name} on an expert's places")
        return NotImplemented

    def _places(self, tensor: Tensor, key: object) -> tuple[Chosen, int, tuple] | None:
        """Return what an index says of picked rows: whose they are, at how many first dims, and new dims of size 1;
        None if it says nothing of them."""
        keys = list(key) if isinstance(key, tuple) else [key]
        while len(keys) > 1 and keys[0] is None:
            keys.pop(0)
        if (mask := self.masks.get(keys[0])) is not None:
            chosen, dims, rest = mask, mask.dims, keys[1:]
        elif isinstance(keys[0], Places):
            count = sum(isinstance(k, Places) for k in keys)
            places, rest = keys[:count], keys[count:]
            chosen = cast(Places, places[0]).chosen
            order = [chosen.order[p.dim] for p in places if isinstance(p, Places) and p.dim is not None]
            if order != list(range(count)):
                raise refuse("indexes by an expert's places in another order")
            dims = count
        else:
            return None
        if tuple(tensor.shape[:dims]) != tuple(chosen.of.shape[:dims]) or any(
            k not in (None, Ellipsis) and k != slice(None) for k in rest
        ):
            raise refuse("indexes other dims than those of the tokens")
        return chosen, dims, tuple(k for k in rest if k is None)

    def _set(self, tensor: Tensor, chosen: Chosen, dims: int, rest: tuple, value: object) -> None:
        """Note `tensor[places] = value`, where the value may be `tensor[places] + rows`."""
        if not isinstance(value, Rows) or rest:
            raise refuse("sets a result to something else than an expert's rows")
        note = value.note
        if note.function is torch.add and len(note.args) == 2 and not note.kwargs:
            for mine, other in (note.args, note.args[::-1]):
                if isinstance(mine, Rows) and mine.note.function is None and mine.note.args[0] is tensor:
                    self._add(tensor, chosen, dims, other, False)
                    return
        self._add(tensor, chosen, dims, value, True)

    def _add(self, tensor: Tensor, chosen: Chosen, dims: int, rows: object, is_set: bool) -> Tensor:
        if not isinstance(rows, Rows) or rows.chosen.of is not chosen.of or rows.chosen.expert != chosen.expert:
            raise refuse("adds rows at the places of others")
        if any(storage_key(read) == storage_key(tensor) for read in rows.note.reads()):
            raise refuse("computes rows from the result that they are added to")
        in_memory = self.results.setdefault(storage_key(tensor), {})
        result = in_memory.setdefault(id(tensor), Result(tensor, dims, is_set))
        of, by_expert = result.rows.setdefault(id(chosen.of), (chosen.of, {}))
        if (result.dims, result.is_set) != (dims, is_set) or chosen.expert in by_expert:
            raise refuse("adds the rows of an expert to a result in several ways")
        by_expert[chosen.expert] = rows
        return tensor

    def _settle(self, result: Result) -> None:
        """Compute the rows of all experts and add them to their result, or set them."""
        for of, by_expert in result.rows.values():
            routed, count = self.routed.get(of), len(by_expert)
            if routed is None:
                raise refuse("reads numbers of experts that are written to before the result is read")
            if sorted(by_expert) != list(range(count)):
                raise refuse("leaves out experts between others")
            if result.is_set and of.dim() > result.dims:
                raise refuse("sets a result to the rows of one of several experts")
            any_slot = any(r.chosen.any_slot for r in by_expert.values())
            if any_slot and not routed.distinct:
                raise refuse("takes a token once for an expert that may have been chosen twice")
            group = of.reshape(-1)
            some = group if routed.classes <= count else group.clamp(0, count - 1)
            rows = Grouped(some, self.selected.get, refuse).rows([by_expert[i].note for i in range(count)])
            tail = tuple(rows.shape[1:])
            before = result.tensor
            if routed.classes > count:
                is_here = (group < count).reshape(-1, *(1,) * len(tail))
                kept = before.reshape(rows.shape) if result.is_set else torch.zeros((), dtype=rows.dtype)
                rows = torch.where(is_here, rows, kept.to(rows.dtype))
            copies = of[(0,) * result.dims].numel() if of.dim() > result.dims else 1
            if copies > 1:
                rows = rows.view(-1, copies, *tail).sum(1)
            rows = rows.reshape(before.shape).to(before.dtype)
            before.copy_(rows) if result.is_set else before.add_(rows)

    def _remember(self, function: Callable, name: str, args: tuple, kwargs: dict, made: object) -> None:
        """Remember numbers of chosen experts, comparisons with them, and parts of stacked weights."""
        first = args[0] if args else None
        if name in ROUTES and isinstance(first, Tensor) and first.dim():
            indices = made if ROUTES[name] is None else made[1] if isinstance(made, tuple) and len(made) > 1 else None
            if isinstance(indices, Tensor) and indices.dtype in INTEGERS:
                dim = kwargs.get("dim", next((a for a in args[1 + (name == "topk") :] if type(a) is int), -1))
                is_last = dim in (-1, first.dim() - 1)
                if is_last:
                    distinct = name in ("topk", "sort", "argsort")
                    self.routed[indices] = Routed(first.shape[-1], distinct)
        if not isinstance(made, Tensor) or not isinstance(first, Tensor):
            return
        if (known := self.routed.get(first)) is not None:
            if (name in SAME_NUMBERS or name == "getitem") and made.dtype in INTEGERS:
                keeps = made.dim() > 0 and made.shape[-1:] == first.shape[-1:] and name != "getitem"
                self.routed[made] = Routed(known.classes, known.distinct and keeps)
            if name == "eq" and len(args) == 2 and type(args[1]) is int:
                self.masks[made] = Chosen(first, args[1], tuple(range(first.dim())))
            if function is F.one_hot or name == "one_hot":
                self.one_hot[made] = first, tuple(range(made.dim()))
        if (of_numbers := self.one_hot.get(first)) is not None:
            numbers, order = of_numbers
            if name in ("permute", "transpose", "t"):
                self._permuted(name, args, made, numbers, order)
            if name == "getitem" and type(args[1]) is int and order[0] == numbers.dim():
                self.masks[made] = Chosen(numbers, args[1], order[1:])
        if (chosen := self.masks.get(first)) is not None and name == "any":
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            if chosen.dims == 2 and chosen.order == (0, 1) and dim in (-1, 1) and not kwargs.get("keepdim"):
                self.masks[made] = replace(chosen, order=(0,), any_slot=True)
        if name == "getitem" and type(args[1]) is int and first.dim() > 1 and args[1] >= 0:
            self.selected[made] = first, args[1]

    def _permuted(self, name: str, args: tuple, made: Tensor, numbers: Tensor, order: tuple[int, ...]) -> None:
        dims = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
        if name == "permute":
            order = tuple(order[d] for d in dims)
        else:
            a, b = dims or (0, 1)
            swapped = list(order)
            swapped[a], swapped[b] = swapped[b], swapped[a]
            order = tuple(swapped)
        self.one_hot[made] = numbers, order


def _tensors(tree: object):
    """Iterate over the tensors in nested arguments."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            yield from _tensors(value)
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
