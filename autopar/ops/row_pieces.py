"""An op that computes a small program of row-wise ops for some rows at a time.

    in_pieces("t0 = autopar.linear.default(r0, w0); t1 = aten.relu.default(t0); return (t1,), ()", [x], [weight])

The program is text, so that a graph shows it and a file holds it: `r0`, `r1` are tensors of rows, which are cut, `w0`,
`w1` what every piece reads whole. It returns tensors of rows, which stand side by side, and sums over rows, which add
up over pieces. What is between exists for one piece. Nothing but ops, their results by number (`t2 = t1[0]`), numbers,
types and numbers that depend on a piece's place (`place(2, 5)` is twice that and 5) can be written in it.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

aten = torch.ops.aten
MOST_ROWS = 2**12  # of a piece
NUMBERS = {"inf": math.inf, "nan": math.nan}
TYPES = (torch.dtype, torch.memory_format)
NONE: Mapping[Any, Any] = MappingProxyType({})


def pieces_of(rows: Sequence[int]) -> tuple[int, int]:
    """Return the dim that tensors with these leading sizes are cut along, and into how many pieces: the longest dim,
    into as many as leave `MOST_ROWS` rows in each, or as few as can be."""
    if not rows:
        return 0, 1
    dim = max(range(len(rows)), key=lambda d: rows[d])
    return dim, max(1, min(rows[dim], -(-math.prod(rows) // MOST_ROWS)))


def share_of(rows: Sequence[int]) -> float:
    """Return the part of tensors with these leading sizes that the largest piece has."""
    dim, count = pieces_of(rows)
    return -(-rows[dim] // count) / rows[dim] if rows and rows[dim] else 1.0


@custom_op("autopar::in_pieces", mutates_args=())
def in_pieces(program: str, rows: Sequence[Tensor], whole: Sequence[Tensor]) -> list[Tensor]:
    """Return what a program returns: rows as whole tensors, then the sums."""
    known = parsed(program)
    dim, count = pieces_of(rows[0].shape[:-1])
    size = rows[0].shape[dim]
    if count == 1 or not size:
        return [x.contiguous() for x in known(rows, whole)]
    found: list[Tensor] = []
    for start, end in cuts(size, count):
        here = [x.narrow(dim, start, end - start).contiguous() for x in rows]  # else products copy the weights
        made = known(here, whole, dict(zip(known.sums, found[len(known.rows) :])))
        if not found:
            types = [x.dtype for x in made]
            shapes = [(*x.shape[:dim], size, *x.shape[dim + 1 :]) for x in made[: len(known.rows)]]
            found = [x.new_empty(shape) for x, shape in zip(made, shapes)]
            found += [x if name in known.products else wide(x) for name, x in zip(known.sums, made[len(found) :])]
        for x, piece in zip(found, made[: len(known.rows)]):
            aten.copy_(x.narrow(dim, start, end - start), piece)
        del here, made
    return [x.to(type_) for x, type_ in zip(found, types)]


def wide(x: Tensor) -> Tensor:
    """Return a sum in a type to which those of many pieces can be added."""
    return x.float() if x.dtype.itemsize < 4 else x


@in_pieces.register_fake
def _(program, rows, whole):
    return [x.new_empty(x.shape) for x in parsed(program)(rows, whole)]


def cuts(size: int, count: int) -> Iterator[tuple[int, int]]:
    """Iterate over the ends of pieces that differ by one at most, the largest first."""
    small, larger = divmod(size, count)
    start = 0
    for i in range(count):
        end = start + small + (i < larger)
        yield start, end
        start = end


@dataclass(frozen=True)
class Name:
    """A place in a program's arguments that a tensor takes."""

    name: str


@dataclass(frozen=True)
class Place:
    """A number that grows by `step` with the place of a piece's first row, from `first` on."""

    step: int
    first: int


@dataclass(frozen=True)
class _Step:
    """One op, and the names that no later step reads."""

    name: str
    target: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    last: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """A parsed program; calling it computes one piece."""

    steps: tuple[_Step, ...]
    rows: tuple[str, ...]
    sums: tuple[str, ...]

    @cached_property
    def products(self) -> frozenset[str]:
        """Return the names of what products of all rows give."""
        return frozenset(step.name for step in self.steps if step.target is torch.ops.autopar.linear_dw.default)

    def __call__(
        self,
        rows: Sequence[Tensor],
        whole: Sequence[Tensor],
        sums: Mapping[str, Tensor] = NONE,
        place: int = 0,
        instead: Mapping[object, Callable[..., Any]] = NONE,
    ) -> list[Tensor]:
        """Return the rows of a piece and its sums, or what those add to if `sums` are given by name, which change.
        `place`: of the piece's first row; `instead`: what is called in the place of ops."""
        tensors = {f"r{i}": x for i, x in enumerate(rows)} | {f"w{i}": x for i, x in enumerate(whole)}
        for step in self.steps:
            args = [_given(a, tensors, place) for a in step.args]
            target = instead.get(step.target, step.target)
            if step.name in sums:
                tensors[step.name] = _added(sums[step.name], target, args, step.kwargs)
            else:
                tensors[step.name] = target(*args, **step.kwargs)
            del args
            for name in step.last:
                del tensors[name]
        return [tensors[name] for name in (*self.rows, *self.sums)]


def _given(argument: Any, tensors: Mapping[str, Tensor], place: int) -> Any:
    """Return what stands for an argument of a program in the piece at a place."""
    match argument:
        case Name(name):
            return tensors[name]
        case Place(step, first):
            return first + step * place
        case list():
            return [_given(a, tensors, place) for a in argument]
    return argument


def _added(total: Tensor, target: Callable[..., Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Add what an op gives to a sum, in place; a product without a copy of its own. One that is called instead of an op
    may have added it already, and gives the sum."""
    if target is not torch.ops.autopar.linear_dw.default:
        more = target(*args, **kwargs)
        return total if more is total else total.add_(more)
    grad, x = (t.reshape(-1, t.shape[-1]) for t in args)
    return total.addmm_(grad.t(), x)


@lru_cache(maxsize=256)
def parsed(text: str) -> Program:
    """Return the program that a text says. Raises ValueError for what is none."""
    match ast.parse(text).body:
        case [*lines, ast.Return(ast.Tuple([ast.Tuple(made), ast.Tuple(added)]))]:
            rows, sums, calls = tuple(map(_id, made)), tuple(map(_id, added)), list(map(_assigned, lines))
        case _:
            raise ValueError(f"no program of rows: {text:.80}")
    read = [{n.id for n in ast.walk(call) if isinstance(n, ast.Name)} for _, call in calls]
    kept = {*rows, *sums, *(n for names in read for n in names if n[0] in "rw")}
    steps = []
    for i, (name, call) in enumerate(calls):
        later = kept.union(*read[i + 1 :])
        last = sorted(({name} | {n for n in read[i] if n[0] == "t" and n[1:].isdigit()}) - later)
        steps.append(_Step(name, *_called(call), tuple(last)))
    return Program(tuple(steps), rows, sums)


def _id(item: ast.expr) -> str:
    """Return the name that stands somewhere."""
    if isinstance(item, ast.Name):
        return item.id
    raise ValueError(f"{ast.unparse(item)} is no name")


def _assigned(line: ast.stmt) -> tuple[str, ast.Call | ast.Subscript]:
    """Return the name that a line gives to the result of a call, or to one of several, and what stands for that."""
    match line:
        case ast.Assign([ast.Name(name)], ast.Call() as call) if all(k.arg for k in call.keywords):  # no **named
            return name, call
        case ast.Assign([ast.Name(name)], ast.Subscript(ast.Name(), ast.Constant(int())) as item):
            return name, item
    raise ValueError(f"{ast.unparse(line)} is no call of an op")


def _called(item: ast.Call | ast.Subscript) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return an op with its arguments."""
    if isinstance(item, ast.Subscript):
        return operator.getitem, (_value(item.value), _value(item.slice)), {}
    return _op(item.func), tuple(map(_value, item.args)), {k.arg: _value(k.value) for k in item.keywords if k.arg}


def _op(path: ast.expr) -> Callable[..., Tensor]:
    """Return the op that a path such as `aten.add.Tensor` names."""
    if ast.unparse(path) == "operator.getitem":
        return operator.getitem
    namespace, name, overload = ast.unparse(path).split(".")
    if namespace not in ("aten", "autopar", "_c10d_functional"):
        raise ValueError(f"{ast.unparse(path)} is no op of rows")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _value(item: ast.expr) -> Any:
    """Return a name of a tensor, a number, a list of them, a type or a number by place, as an argument says."""
    if isinstance(item, ast.Call) and isinstance(item.func, ast.Name) and item.func.id == "place":
        return Place(*map(ast.literal_eval, item.args))
    if isinstance(item, ast.Name):
        return NUMBERS.get(item.id) or Name(item.id)
    if isinstance(item, ast.UnaryOp) and isinstance(item.op, ast.USub):
        return -_value(item.operand)
    if isinstance(item, ast.List):
        return [_value(x) for x in item.elts]
    if isinstance(item, ast.Attribute) and isinstance(found := getattr(torch, item.attr, None), TYPES):
        return found
    return ast.literal_eval(item)
