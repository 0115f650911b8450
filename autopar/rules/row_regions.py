"""Find regions of row-wise ops that are wide inside and narrow at both ends: MLPs, with their backward.

    forward     source -> linear, activation, product, linear -> end        each row of `end` needs its row of `source`
    backward    the end's gradient, and tensors of the forward -> the source's gradient, weights' gradients

A row is all but the last dim of a tensor. The wide tensors are read inside alone, so that a region may be computed for
some rows at a time: of those that leave it, rows stand side by side and gradients of weights add up. A joint graph is
searched, or one device's, in which a redistribution of a wide tensor is another reader.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from ..ir.graph import is_op, tensor_arguments
from ..ops import autopar
from .reading import bound
from .register import full_name
from .table import ACTIVATIONS, BINARY, POINTWISE_BACKWARDS, UNARY

aten = torch.ops.aten
OTHERS = """add.Tensor sub.Tensor rsub.Tensor mul.Tensor mul.Scalar div.Tensor div.Scalar neg positive where.self
    masked_fill.Scalar _to_copy"""
POINTWISE = frozenset(map(full_name, f"{UNARY} {ACTIVATIONS} {BINARY} {POINTWISE_BACKWARDS} {OTHERS}".split()))
PRODUCTS = (autopar.linear.default, autopar.linear_dx.default)  # of rows with a matrix
MOST_NODES = 64  # of the forward of a region


@dataclass(frozen=True)
class RowRegion:
    """The ops of a region in the graph's order. `forward` ends with what leaves it; `gradient` is that of it, where the
    backward reads it."""

    source: fx.Node
    forward: tuple[fx.Node, ...]
    gradient: fx.Node
    backward: tuple[fx.Node, ...]

    @property
    def node(self) -> fx.Node:
        """Return the op whose output leaves the forward, by whose name a plan knows the region."""
        return self.forward[-1]

    @property
    def module(self) -> str:
        """Return the name of the module that most of the forward comes from."""
        modules = [str(node.meta.get("module", "")) for node in self.forward]
        shared = modules[0].split(".")
        for module in modules:
            shared = [a for a, b in zip(shared, module.split(".")) if a == b]
        return ".".join(shared)

    @cached_property
    def sums(self) -> tuple[fx.Node, ...]:
        """Return the ops of the backward that add up rows: gradients of weights."""
        return tuple(node for node in self.backward if sums_rows(node))

    @cached_property
    def results(self) -> tuple[fx.Node, ...]:
        """Return the ops of the backward whose rows leave it."""
        return tuple(n for n in self.backward if n not in self.sums and any(u not in self.backward for u in n.users))

    @cached_property
    def never_made(self) -> tuple[fx.Node, ...]:
        """Return the tensors of which some rows are there at a time, where the region is computed in pieces."""
        leaves = (*self.sums, *self.results)
        return (*self.forward[:-1], *(node for node in self.backward if node not in leaves))

    @cached_property
    def again(self) -> tuple[fx.Node, ...]:
        """Return the ops of the forward that the backward runs again, as their tensors do not wait for it."""
        needed = set()
        for node in reversed(self.forward[:-1]):
            if any(user in self.backward or user in needed for user in node.users):
                needed.add(node)
        return tuple(node for node in self.forward if node in needed)

    @cached_property
    def whole(self) -> tuple[fx.Node, ...]:
        """Return what each piece reads all of, weights above all, forward and backward, in order."""
        return _distinct(a for node in (*self.forward, *self.backward) for a in _whole(node))


def row_regions(graph: fx.Graph) -> tuple[RowRegion, ...]:
    """Return the regions of a graph, in its order: of those that share ops the first that ends."""
    finder, found, taken = _Finder(graph), [], set[fx.Node]()
    for node in graph.nodes:
        if node.meta.get("phase") == "forward" and _is_row_wise(node) and (region := finder.region(node)) is not None:
            if taken.isdisjoint((*region.forward, *region.backward)):
                found.append(region)
                taken |= {*region.forward, *region.backward}
    return tuple(found)


def sums_rows(node: fx.Node) -> bool:
    """Return whether an op adds up all rows of its arguments."""
    if node.target is autopar.linear_dw.default:
        return True
    if node.target is not aten.sum.dim_IntList:
        return False
    ndim = tensor_arguments(node)[0].meta["val"].dim()
    return {d % ndim for d in bound(node)["dim"] or range(ndim)} == set(range(ndim - 1))


def rows_read(node: fx.Node) -> list[fx.Node]:
    """Return the arguments of an op of which a row gives the row of the result."""
    arguments = tensor_arguments(node)
    if node.target in PRODUCTS:
        return arguments[:1]
    if sums_rows(node):
        return arguments
    return [a for a in arguments if not _is_of_all_rows(a, node)]


def _whole(node: fx.Node) -> list[fx.Node]:
    rows = rows_read(node)
    return [a for a in tensor_arguments(node) if a not in rows]


def _is_of_all_rows(argument: fx.Node, node: fx.Node) -> bool:
    """Return whether an argument of a pointwise op is the same for all rows."""
    shape, rows = argument.meta["val"].shape, node.meta["val"].shape[:-1]
    return all(size == 1 for size in shape[:-1]) and not (len(shape) == len(rows) + 1 and shape[:-1] == rows)


def _is_row_wise(node: fx.Node) -> bool:
    """Return whether each row of an op's result is made of the same row of its arguments."""
    if not is_op(node) or not isinstance(node.meta.get("val"), torch.Tensor) or node.meta["val"].dim() < 2:
        return False
    if node.target not in PRODUCTS and str(node.target) not in POINTWISE:
        return False
    rows, read = node.meta["val"].shape[:-1], rows_read(node)
    return bool(read) and all(a.meta["val"].shape[:-1] == rows for a in read)


def _width(node: fx.Node) -> int:
    """Return the global size of the last dim of a tensor."""
    return int(node.meta.get("global", node.meta["val"]).shape[-1])


def _key(node: fx.Node) -> str:
    """Return the name of the tensor that a node holds, in whatever layout."""
    return str(node.meta.get("tensor", node.name))


def _distinct(nodes: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
    return tuple(dict.fromkeys(nodes))


class _Finder:
    """Looks for regions of one graph by their ends."""

    def __init__(self, graph: fx.Graph):
        self.position = {node: i for i, node in enumerate(graph.nodes)}

    def region(self, end: fx.Node) -> RowRegion | None:
        """Return the region that ends with an op of the forward, None if there is none."""
        found = self._forward(end)
        if found is None:
            return None
        source, forward = found
        known = self._backward(source, forward)
        return None if known is None else RowRegion(source, forward, *known)

    def _sorted(self, nodes: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
        return tuple(sorted(nodes, key=self.position.__getitem__))

    def _grown(self, inside: set[fx.Node], known: Collection[fx.Node], width: int, phase: str) -> fx.Node | None:
        """Add the producers of what ops read until that is one tensor, of `width` at most, and return it: None if an op
        in between is not row-wise, or of another phase. `known`: what may be read besides."""
        open_ = {a for node in inside for a in rows_read(node)} - inside - set(known)
        while len(open_) > 1 or any(_width(a) > width for a in open_):
            latest = max(open_, key=self.position.__getitem__)
            if latest.meta.get("phase") != phase or not _is_row_wise(latest) or len(inside) > MOST_NODES:
                return None
            inside.add(latest)
            open_ = (open_ | set(rows_read(latest))) - inside - set(known)
        return next(iter(open_), None)

    def _forward(self, end: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]] | None:
        """Return the source of a region and its ops."""
        inside = {end}
        source = self._grown(inside, (), _width(end), "forward")
        if source is None or all(_width(node) <= _width(end) for node in inside):
            return None
        readers = {user for node in inside - {end} for user in node.users} - inside
        if any(user.meta.get("phase") != "backward" for user in readers):
            return None
        return source, self._sorted(inside)

    def _backward(self, source: fx.Node, forward: tuple[fx.Node, ...]) -> tuple[fx.Node, tuple[fx.Node, ...]] | None:
        """Return the gradient that a region's backward starts from, and its ops."""
        *inner, end = forward
        inside = {user for node in inner for user in node.users if user not in forward}
        if not inside or not all(_is_row_wise(node) or sums_rows(node) for node in inside):
            return None
        sources = {a for node in inside for a in rows_read(node) if _key(a) == _key(source)}
        known = {*inner, source, *sources}
        gradient = self._grown(inside, known, _width(end), "backward")
        if gradient is None or not self._finished(inside, known | {gradient}, forward):
            return None
        return gradient, self._sorted(inside)

    def _finished(self, inside: set[fx.Node], known: set[fx.Node], forward: tuple[fx.Node, ...]) -> bool:
        """Add what reads wide tensors, and what makes the gradient of the source of narrow ones; return whether that is
        all row-wise."""
        most, weights = _width(forward[-1]), {_key(a) for node in forward for a in _whole(node)}
        keys = {_key(a) for a in known}
        waiting = list(self._sorted(inside))
        while waiting:
            node = waiting.pop(0)
            if sums_rows(node):
                continue
            for user in [u for u in self._sorted(node.users) if u not in inside]:
                is_known = is_op(user) and (sums_rows(user) or _is_row_wise(user))
                is_known = is_known and all(a in inside or _key(a) in keys for a in rows_read(user))
                if _width(node) > most and not is_known:
                    return False
                if is_known and (_width(node) > most or self._goes_on(user, inside, weights)):
                    inside.add(user)
                    waiting = list(self._sorted(inside))
                    break
        return True

    def _goes_on(self, user: fx.Node, inside: set[fx.Node], weights: set[str]) -> bool:
        """Return whether a reader of narrow gradients is of the region: a product with a weight of it, a sum over rows,
        or the sum of two of its own."""
        if user.target is autopar.linear_dx.default:
            return _key(tensor_arguments(user)[1]) in weights
        return sums_rows(user) or user.target is aten.add.Tensor and all(a in inside for a in rows_read(user))
