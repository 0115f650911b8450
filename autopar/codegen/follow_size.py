"""One program for every size of some dims, from the programs of one plan for a few sizes.

Programs for several lengths are one graph with other numbers in it: sizes of views, ends of slices, counts that a mean
divides by. The program that `followed` returns takes the sizes as its last arguments and computes each such number from
them: it is on a line over one size, or is a product of such a line and of sizes or their squares. Two points are enough
to tell these apart, if a line crosses zero near size zero (`NEAR`) and no two products of sizes grow alike
(`is_telling`); three points always are. What else a number could be between and beyond the points is for
the caller to rule out (see autopar/runtime/following.py).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import fx

from .._torch import graph_module

Sizes = tuple[int, ...]
SIZE = "size"  # the name of the placeholders that take them
# The chord of a square through sizes a and b crosses zero at a b / (a + b), which is half of the smaller one or more. A
# line that crosses zero within this part of it is none.
NEAR = Fraction(1, 4)
DEGREE = 3  # of a product of sizes
SHIFTS = (-2, -1, 1, 2)  # of a size that numbers may have instead of it: labels are one fewer than tokens


class Differs(Exception):
    """Programs for several sizes differ in more than numbers on lines; the text says in what."""


@dataclass(frozen=True)
class Factor:
    """The whole number (slope * size + start) ** power, of the size at a place among the sizes."""

    place: int
    slope: int = 1
    start: int = 0
    power: int = 1

    def of(self, sizes: Sizes) -> int:
        """Return the number at some sizes."""
        return int((self.slope * sizes[self.place] + self.start) ** self.power)


@dataclass(frozen=True)
class Line:
    """The whole number times * (product of the factors) / divisor, of one sign at all sizes; `kind`: int, float, or
    reciprocal for one over it."""

    factors: tuple[Factor, ...]
    times: int
    divisor: int
    kind: str
    sign: int

    def whole(self, sizes: Sizes) -> int:
        """Return the whole number at sizes that the line `serves`."""
        return self._total(sizes) // self.divisor

    def at(self, sizes: Sizes) -> int | float:
        """Return what stands in the program for some sizes."""
        return _OF_KIND[self.kind](self.whole(sizes))

    def serves(self, sizes: Sizes) -> bool:
        """Return whether the number is whole at some sizes, and of the sign that it has at those that are known."""
        total = self._total(sizes)
        return total % self.divisor == 0 and _sign(total) == self.sign

    def _total(self, sizes: Sizes) -> int:
        return self.times * math.prod(factor.of(sizes) for factor in self.factors)


_OF_KIND: dict[str, Callable[[int], int | float]] = {"int": int, "float": float, "reciprocal": lambda n: 1.0 / n}


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)


def line_through(values: Mapping[Sizes, Any]) -> Any:
    """Return the number that stands for equal ones, or the line of those that change, by sizes. Raises Differs."""
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


def _line(values: Mapping[Sizes, int], kind: str) -> Line:
    """Return the one line through some numbers: a product of sizes if there is one, else one with a line that crosses
    zero elsewhere."""
    if (line := _only_line(tuple(values.items()), kind)) is not None:
        return line
    raise Differs(f"{', '.join(map(str, values.values()))} at sizes {', '.join(map(str, values))} are on no one line")


@lru_cache(maxsize=10_000)  # equal blocks have the same numbers
def _only_line(known: tuple[tuple[Sizes, int], ...], kind: str) -> Line | None:
    values = dict(known)
    for candidates in (_products, _shifted):
        found = {line for line in candidates(values, kind) if _is_through(line, values)}
        if found:
            return found.pop() if len(found) == 1 else None
    return None


def _is_through(line: Line, values: Mapping[Sizes, int]) -> bool:
    return all(line.serves(sizes) and line.whole(sizes) == number for sizes, number in values.items())


def _varying(points: Sequence[Sizes]) -> list[int]:
    """Return the places of the sizes that are not the same at all points."""
    return [place for place, found in enumerate(zip(*points)) if len(set(found)) > 1]


def _powers(points: Sequence[Sizes]) -> Iterator[dict[int, int]]:
    """Return the powers of sizes in a product, by their places, of every product of sizes that vary."""
    places = _varying(points)
    for powers in product(range(DEGREE), repeat=len(places)):
        if 0 < sum(powers) <= DEGREE:
            yield {place: power for place, power in zip(places, powers) if power}


def _product(sizes: Sizes, powers: Mapping[int, int]) -> int:
    return math.prod(sizes[place] ** power for place, power in powers.items())


def _products(values: Mapping[Sizes, int], kind: str) -> Iterator[Line]:
    points = [*values]
    for powers in _powers(points):
        times = Fraction(values[points[0]], _product(points[0], powers))
        factors = tuple(Factor(place, power=power) for place, power in powers.items())
        yield Line(factors, times.numerator, times.denominator, kind, _sign(times.numerator))


def _shifted(values: Mapping[Sizes, int], kind: str) -> Iterator[Line]:
    """Return candidates with a line over one of the sizes. Beside other sizes that vary it crosses zero at a whole
    size."""
    points, is_single = [*values], len(_varying([*values])) == 1
    for powers in _powers(points):
        for place in [place for place, power in powers.items() if power == 1]:
            others = {p: power for p, power in powers.items() if p != place}
            parts = {sizes: Fraction(number, _product(sizes, others)) for sizes, number in values.items()}
            low, high = (choose(points, key=lambda sizes: sizes[place]) for choose in (min, max))
            slope = (parts[high] - parts[low]) / (high[place] - low[place])
            start = parts[low] - slope * low[place]
            is_near = abs(start) <= abs(slope) * NEAR * low[place] and (is_single or (start / slope).denominator == 1)
            if slope and (is_near or len({sizes[place] for sizes in points}) > 2):
                divisor = math.lcm(slope.denominator, start.denominator)
                line = Factor(place, int(slope * divisor), int(start * divisor))
                factors = (line, *(Factor(p, power=power) for p, power in others.items()))
                yield Line(factors, 1, divisor, kind, _sign(values[points[0]]))


def is_telling(a: Sizes, b: Sizes) -> bool:
    """Return whether numbers at two points tell which product of sizes they are: no two grow alike between them, and
    none stays as it is, or would if a size had a few more or fewer places."""
    if any(x == y for x, y in zip(a, b)):
        return False
    plain, once, _ = _growths((a, b), [SHIFTS] * len(a))
    return len({*plain}) == len(plain) and (1,) not in (*plain, *once)


def is_telling_all(a: Sizes, b: Sizes) -> bool:
    """Return whether numbers at two points tell also which of the sizes has a few more or fewer places in them."""
    plain, once, _ = _growths((a, b), [SHIFTS] * len(a))
    return is_telling(a, b) and len({*plain, *once}) == len(plain) + len(once)


def is_sure(points: Sequence[Sizes], shifts: Sequence[Collection[int | Fraction]], tells_all: bool = False) -> bool:
    """Return whether a product of sizes that is found in numbers at some points is the one that they are, and a line
    with another number of places of one size as well, if it is the only one (with `tells_all` it is). `shifts`: by
    place, how many more or fewer a size may have."""
    if any(len({*of_place}) < len(points) for of_place in zip(*points)):
        return False
    plain, once, others = _growths(points, shifts)
    constant = (1,) * (len(points) - 1)
    known = {constant, *plain}
    if len(known) <= len(plain) or not known.isdisjoint(once + others):
        return False
    return (not tells_all or len({*once}) == len(once)) and not any(_is_on_line(points, of) for of in {*others})


Growth = tuple[Fraction, ...]  # from the first of some points to each of the others


def _growths(
    points: Sequence[Sizes], shifts: Sequence[Collection[int | Fraction]]
) -> tuple[list[Growth], list[Growth], list[Growth]]:
    """Return how products of sizes grow between points: as they are, with another number of places of one size, and of
    two."""
    found: tuple[list[Growth], list[Growth], list[Growth]] = [], [], []
    for of in _powers(points):
        moves = [(0, *shifts[place]) if power == 1 else (0,) for place, power in of.items()]
        for shift in product(*moves):
            moved = [[sizes[place] + k for place, k in zip(of, shift)] for sizes in points]
            many = sum(map(bool, shift)) if all(k == int(k) for k in shift) else 2  # no line has parts of a place
            if many <= 2 and min(map(min, moved)) > 0:
                first, *others = (math.prod(n**power for n, power in zip(one, of.values())) for one in moved)
                found[many].append(tuple(Fraction(other) / first for other in others))
    return found


def _is_on_line(points: Sequence[Sizes], growth: Growth) -> bool:
    """Return whether numbers that grow so are on a line with another number of places of one size, as `_shifted` has
    them."""
    for of in _powers(points):
        for place in [place for place, power in of.items() if power == 1]:
            others = {p: power for p, power in of.items() if p != place}
            at = [sizes[place] for sizes in points]
            whole = [_product(sizes, others) for sizes in points]
            ratios = [g * whole[0] / n for g, n in zip(growth, whole[1:])]
            if 1 in ratios:
                continue
            shifts = {(at[0] * ratio - n) / (1 - ratio) for ratio, n in zip(ratios, at[1:])}
            if len(shifts) == 1 and (k := shifts.pop()).denominator == 1 and abs(k) <= NEAR * min(at):
                return True
    return False


def follow(
    values: Mapping[Sizes, Any], number: Callable[[Any], Any] = lambda line: line, nodes: Callable | None = None
):
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


def followed(programs: Mapping[Sizes, fx.GraphModule]) -> tuple[fx.GraphModule, frozenset[Line]]:
    """Return the program that takes the sizes as its last arguments, from those for some sizes, and the lines of its
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
        if node.op != "placeholder" and not made.sizes:
            made.sizes = [graph.placeholder(f"{SIZE}_{place}") for place, _ in enumerate(max(programs))]
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


def _check_alike(nodes: Mapping[Sizes, fx.Node], programs: Mapping[Sizes, fx.GraphModule]) -> None:
    """Raise Differs unless nodes of several programs do the same, on the same constants."""
    first, *others = nodes.values()
    if any((n.op, n.target) != (first.op, first.target) for n in others):
        raise Differs(f"{first.target} and {others[-1].target} in one place")
    if first.op == "get_attr":
        one, *more = (getattr(module, str(first.target)) for module in programs.values())
        if isinstance(one, torch.Tensor) and not all(one.shape == o.shape and torch.equal(one, o) for o in more):
            raise Differs(f"the constant {first.target} has other values at other sizes")


class _Numbers:
    """The nodes that compute numbers from the sizes, one a line."""

    def __init__(self) -> None:
        self.sizes: list[fx.Node] = []
        self.nodes: dict[Line, fx.Node] = {}

    def node(self, graph: fx.Graph, line: Line) -> fx.Node:
        if line not in self.nodes:
            values = [self._factor(graph, factor) for factor in line.factors]
            value: Any = values[0]
            for other in values[1:]:
                value = graph.call_function(operator.mul, (value, other))
            value = _applied(graph, value, (operator.mul, line.times, 1), (operator.floordiv, line.divisor, 1))
            if line.kind != "int":
                value = graph.call_function(
                    *((float, (value,)) if line.kind == "float" else (operator.truediv, (1.0, value)))
                )
            self.nodes[line] = value
        return self.nodes[line]

    def _factor(self, graph: fx.Graph, factor: Factor) -> fx.Node:
        steps = (operator.mul, factor.slope, 1), (operator.add, factor.start, 0), (operator.pow, factor.power, 1)
        return _applied(graph, self.sizes[factor.place], *steps)


def _applied(graph: fx.Graph, value: fx.Node, *steps: tuple[Callable, int, int]) -> fx.Node:
    """Return a value after (function, operand, the operand that changes nothing) one after the other."""
    for function, operand, neutral in steps:
        value = value if operand == neutral else graph.call_function(function, (value, operand))
    return value
