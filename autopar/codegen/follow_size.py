"""One program for every size of a dim, from the programs of one plan for a few sizes.

Programs for several lengths are one graph with other numbers in it: sizes of views, ends of slices, counts that a mean
divides by. The program that `followed` returns takes the size as its last argument and computes each such number from
it: all of them lie on lines over the size, or are a square of it times a factor. Two points are enough to tell them
apart from the chord of another curve, if the line crosses zero near size zero (`NEAR`); three points always are. What
else a number could be between and beyond the points is for the caller to rule out (see autopar/runtime/following.py).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import fx

from .._torch import graph_module

SIZE = "size"  # the name of the placeholder that takes it
# The chord of a square through sizes a and b crosses zero at a b / (a + b), which is half of the smaller one or more. A
# line that crosses zero within this part of it is none.
NEAR = 0.25


class Differs(Exception):
    """Programs for several sizes differ in more than numbers on lines; the text says in what."""


@dataclass(frozen=True)
class Line:
    """The whole number (slope * size ** power + start) / divisor, of one sign at every size; `kind`: int, float, or
    reciprocal for one over it. The square of the size is a line too, if nothing is added to it."""

    slope: int
    start: int
    divisor: int
    kind: str
    sign: int
    power: int = 1

    def whole(self, size: int) -> int:
        """Return the whole number at a size that the line `serves`."""
        return self._total(size) // self.divisor

    def at(self, size: int) -> int | float:
        """Return what stands in the program for a size."""
        return _OF_KIND[self.kind](self.whole(size))

    def serves(self, size: int) -> bool:
        """Return whether the number is whole at a size, and of the sign that it has at those that are known."""
        total = self._total(size)
        return total % self.divisor == 0 and _sign(total) == self.sign

    def _total(self, size: int) -> int:
        return int(self.slope * size**self.power + self.start)


_OF_KIND: dict[str, Callable[[int], int | float]] = {"int": int, "float": float, "reciprocal": lambda n: 1.0 / n}


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)


def line_through(values: Mapping[int, Any]) -> Any:
    """Return the number that stands for equal ones, or the line of those that change, by size. Raises Differs."""
    numbers = list(values.values())
    first = numbers[0]
    if len({type(n) for n in numbers}) > 1:
        raise Differs(f"{numbers} are of several types")
    if all(n == first or n != n and first != first for n in numbers):
        return first
    if type(first) is int:
        return _line(values, "int")
    if type(first) is float and all(math.isfinite(n) and n for n in numbers):
        if all(n.is_integer() for n in numbers):
            return _line({size: int(n) for size, n in values.items()}, "float")
        counts = {size: round(1 / n) for size, n in values.items()}
        if all(counts[size] and 1.0 / counts[size] == n for size, n in values.items()):
            return _line(counts, "reciprocal")
    raise Differs(f"{', '.join(map(str, numbers))} at sizes {', '.join(map(str, values))}")


def _line(values: Mapping[int, int], kind: str) -> Line:
    (a, at_a), (b, at_b) = sorted(values.items())[:2]
    for power in (2, 1):
        slope = Fraction(at_b - at_a, b**power - a**power)
        start = at_a - slope * a**power
        divisor = math.lcm(slope.denominator, start.denominator)
        line = Line(int(slope * divisor), int(start * divisor), divisor, kind, _sign(at_a), power)
        is_sure = not start if power == 2 else len(values) > 2 or abs(start) <= abs(slope) * NEAR * a
        if is_sure and all(line.serves(n) and line.whole(n) == v for n, v in values.items()):
            return line
    raise Differs(f"{', '.join(map(str, values.values()))} at sizes {', '.join(map(str, values))} are on no line")


def follow(values: Mapping[int, Any], number: Callable[[Any], Any] = lambda line: line, nodes: Callable | None = None):
    """Return what stands for nested arguments at several sizes: `number` of a line where numbers change, `nodes` of the
    nodes that they name. Raises Differs."""
    found = list(values.values())
    first = found[0]
    if isinstance(first, fx.Node) and nodes is not None:
        return nodes(found)
    if any(type(value) is not type(first) for value in found):
        raise Differs(f"{', '.join(type(value).__name__ for value in found)} in one place")
    if isinstance(first, (tuple, list)):
        if any(len(value) != len(first) for value in found):
            raise Differs("lists of several lengths")
        items = [follow({size: value[i] for size, value in values.items()}, number, nodes) for i in range(len(first))]
        return items if isinstance(first, list) else tuple(items)
    if isinstance(first, dict):
        if any(list(value) != list(first) for value in found):
            raise Differs("other names")
        return {key: follow({size: v[key] for size, v in values.items()}, number, nodes) for key in first}
    if isinstance(first, (int, float)) and not isinstance(first, bool):
        line = line_through(values)
        return number(line) if isinstance(line, Line) else line
    if any(value != first for value in found):
        raise Differs(f"{', '.join(map(str, found))} in one place")
    return first


def followed(programs: Mapping[int, fx.GraphModule]) -> tuple[fx.GraphModule, frozenset[Line]]:
    """Return the program that takes the size as its last argument, from those for several sizes, and the lines of its
    numbers: it is right where all of them serve. Raises Differs."""
    newest = programs[max(programs)]
    all_nodes = [list(module.graph.nodes) for module in programs.values()]
    if len({len(nodes) for nodes in all_nodes}) > 1:
        raise Differs(f"graphs of {', '.join(str(len(nodes)) for nodes in all_nodes)} nodes")
    graph, made = fx.Graph(), _Numbers()
    places = [{node: i for i, node in enumerate(nodes)} for nodes in all_nodes]
    copies: list[fx.Node] = []

    def one_node(found: Sequence[fx.Node]) -> fx.Node:
        if len({place[node] for place, node in zip(places, found)}) > 1:
            raise Differs(f"{found[0].name} and {found[-1].name} in one place")
        return copies[places[0][found[0]]]

    for nodes in zip(*all_nodes):
        by_size = dict(zip(programs, nodes))
        node = by_size[max(programs)]
        _check_alike(by_size, programs)
        if node.op != "placeholder" and made.size is None:
            made.size = graph.placeholder(SIZE)
        number = lambda line: made.node(graph, line)  # noqa: E731
        try:
            args = follow({size: n.args for size, n in by_size.items()}, number, one_node)
            kwargs = follow({size: dict(n.kwargs) for size, n in by_size.items()}, number, one_node)
        except Differs as reason:
            raise Differs(f"{node.name}: {reason}") from None
        copies.append(graph.create_node(node.op, node.target, args, kwargs, node.name))
        copies[-1].meta = dict(node.meta)
    graph.lint()
    module = graph_module(newest, graph, newest.__class__.__name__)
    module.meta |= {k: newest.meta[k] for k in ("rank", "mesh") if k in newest.meta}
    return module, frozenset(made.nodes)


def _check_alike(nodes: Mapping[int, fx.Node], programs: Mapping[int, fx.GraphModule]) -> None:
    """Raise Differs unless nodes of several programs do the same, on the same constants."""
    first, *others = nodes.values()
    if any((n.op, n.target) != (first.op, first.target) for n in others):
        raise Differs(f"{first.target} and {others[-1].target} in one place")
    if first.op == "get_attr":
        one, *more = (getattr(module, str(first.target)) for module in programs.values())
        if isinstance(one, torch.Tensor) and not all(one.shape == o.shape and torch.equal(one, o) for o in more):
            raise Differs(f"the constant {first.target} has other values at other sizes")


class _Numbers:
    """The nodes that compute numbers from the size, one a line."""

    def __init__(self) -> None:
        self.size: fx.Node | None = None
        self.nodes: dict[Line, fx.Node] = {}

    def node(self, graph: fx.Graph, line: Line) -> fx.Node:
        if line not in self.nodes:
            value: Any = self.size
            for function, operand, neutral in (
                (operator.pow, line.power, 1), (operator.mul, line.slope, 1),
                (operator.add, line.start, 0), (operator.floordiv, line.divisor, 1),
            ):  # fmt: skip
                value = value if operand == neutral else graph.call_function(function, (value, operand))
            if line.kind != "int":
                value = graph.call_function(*((float, (value,)) if line.kind == "float" else
                                              (operator.truediv, (1.0, value))))  # fmt: skip
            self.nodes[line] = value
        return self.nodes[line]
