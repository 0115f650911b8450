"""Find regions of row-wise ops that are wide inside and narrow at both ends, with their backward: MLPs, and norms.

    forward     source -> linear, activation, product, linear -> end        each row of `end` needs its row of `source`
    backward    the end's gradient, and tensors of the forward -> the source's gradient, weights' gradients

The wide tensors, in bytes a row, are read inside alone, so that a region may be computed for some rows at a time: of
those that leave it, rows stand side by side and gradients of weights add up. A norm is wide as well: it reduces each
row, and its backward holds several tensors at once. A joint graph is searched, or one device's, in which a
redistribution of a tensor inside is another reader.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from heapq import heapify, heappop, heappush

import torch
from torch import fx

from ..ir.graph import is_op
from .row_wise import (
    PRODUCTS,
    is_row_wise,
    readers,
    reduces_each_row,
    results_of,
    rows_read,
    sums_rows,
    whole_read,
    width_bytes,
    with_ops,
)

aten = torch.ops.aten
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
    def ops(self) -> tuple[fx.Node, ...]:
        """Return the ops of both phases, without the names of what those with several results give."""
        return tuple(node for node in (*self.forward, *self.backward) if is_op(node))

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
        inside = (*self.forward[:-1], *(node for node in self.backward if node not in (*self.sums, *self.results)))
        return tuple(node for node in inside if isinstance(node.meta["val"], torch.Tensor))

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
        return _distinct(a for node in (*self.forward, *self.backward) for a in whole_read(node))


def row_regions(graph: fx.Graph) -> tuple[RowRegion, ...]:
    """Return the regions of a graph, in the order of their ends: of those that share ops the first that ends, or one
    that has all of it inside and is narrow where that ends wide."""
    finder = _Finder(graph)
    for node in graph.nodes:
        if is_op(node) and node.meta.get("phase") == "forward" and node not in finder.found and is_row_wise(node):
            finder.add_region(node)
    return tuple(region for node, region in finder.found.items() if region.node is node)


def _key(node: fx.Node) -> str:
    """Return the name of the tensor that a node holds, in whatever layout."""
    return str(node.meta.get("tensor", node.name))


def _distinct(nodes: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
    return tuple(dict.fromkeys(nodes))


class _Finder:
    """Looks for regions of one graph by their ends. `found`: by op, the regions that are known. Many ends lead to the
    same ops, of which what they read is found out once."""

    def __init__(self, graph: fx.Graph):
        self.rows_read, self.reduces_each_row = cache(rows_read), cache(reduces_each_row)
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.found: dict[fx.Node, RowRegion] = {}

    def add_region(self, end: fx.Node) -> None:
        """Add the region that ends with an op of the forward, or with one of those that follow it alone, if there is
        one that cuts no other."""
        for last in reversed(self._followed(end)):
            forward = self._forward(last)
            backward = None if forward is None else self._backward(*forward)
            if forward is not None and backward is not None:
                region = RowRegion(*forward, *backward)
                ops = {*region.forward, *region.backward}
                if all(ops.issuperset((*one.forward, *one.backward)) for one in map(self.found.get, ops) if one):
                    self.found |= dict.fromkeys(ops, region)
                    return

    def _sorted(self, nodes: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
        return tuple(sorted(with_ops(nodes), key=self.position.__getitem__))

    def _followed(self, end: fx.Node) -> list[fx.Node]:
        """Return an op and those behind it that each read the one before, as it alone is read in the forward, and no
        other rows, such as the product with a norm's weight. What a product gives may be a sum's term on each device,
        so that none is followed."""
        ends = [end]
        while ends[-1].target not in PRODUCTS:
            next_ = [user for user in readers(ends[-1]) if user.meta.get("phase") != "backward"]
            if len(next_) != 1 or not is_row_wise(next_[0]) or next_[0].target in PRODUCTS:
                break
            if self.rows_read(next_[0]) != ends[-1:] or width_bytes(next_[0]) != width_bytes(end):
                break
            ends += next_
        return ends

    def _forward(self, end: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]] | None:
        """Return the source of a region and its ops: those before its end, until there is something to save and all of
        it is made of one tensor that is not wider than the end."""
        inside, most = {end}, width_bytes(end)
        while True:
            read = self._read(inside, ())
            is_worth_it = any(width_bytes(node) > most or self.reduces_each_row(node) for node in inside)
            if _is_one(read, most) and (is_worth_it or next(iter(read)).target in PRODUCTS):
                break
            latest = max(read, key=self.position.__getitem__, default=None)
            if latest is None or not self._is_free(latest, most) or len(inside) > MOST_NODES:
                return None
            inside.update(results_of(latest))
        outside = {user for node in inside - {end} for user in readers(node)} - inside
        if not is_worth_it or any(user.meta.get("phase") != "backward" for user in outside):
            return None
        return read.pop(), self._sorted(inside)

    def _is_free(self, node: fx.Node, most: int) -> bool:
        """Return whether an op may be added to a region that ends with so many bytes a row: it is row-wise, and of no
        region that ends as narrow."""
        is_wide = node not in self.found or width_bytes(self.found[node].node) > most
        return node.meta.get("phase") == "forward" and is_row_wise(node) and is_wide

    def _backward(self, source: fx.Node, forward: tuple[fx.Node, ...]) -> tuple[fx.Node, tuple[fx.Node, ...]] | None:
        """Return the gradient that a region's backward starts from, and its ops."""
        *inner, end = forward
        inside = {user for node in inner for user in readers(node) if user not in forward}
        if not inside or not all(is_row_wise(node) or sums_rows(node) for node in inside):
            return None
        sources = {a for node in inside for a in self.rows_read(node) if _key(a) == _key(source)}
        known, most = {*inner, source, *sources}, width_bytes(end)
        while not _is_one(read := self._read(inside, known), most):
            latest = max(read, key=self.position.__getitem__, default=end)
            if latest.meta.get("phase") != "backward" or not is_row_wise(latest) or len(inside) > MOST_NODES:
                return None
            inside.update(results_of(latest))
        gradient = read.pop()
        closed = Closure({_key(a) for a in (*known, gradient)}, self.position).of(inside, width_bytes(source), most)
        return None if closed is None else (gradient, self._sorted(closed))

    def _read(self, inside: Collection[fx.Node], known: Collection[fx.Node]) -> set[fx.Node]:
        """Return the rows that ops read of what is neither made inside nor known."""
        return {a for node in inside for a in self.rows_read(node) if a not in inside and a not in known}


def _is_one(read: Collection[fx.Node], most: int) -> bool:
    """Return whether ops read one tensor, of at most so many bytes a row."""
    return [width_bytes(a) <= most for a in read] == [True]


class Closure:
    """Grows the backward of a region from the ops that read its tensors. `names`: of tensors that are there."""

    def __init__(self, names: set[str], position: dict[fx.Node, int]):
        self.names, self.position, self.inside = names, position, set[fx.Node]()

    def of(self, asked: set[fx.Node], width: int, most: int) -> set[fx.Node] | None:
        """Return the first ops, with all that are asked for, whose rows leave as one tensor of `width` bytes a row; or,
        if they leave as several, all that can be made of what is there. None if one that leaves has more than `most`
        bytes a row."""
        waiting = [(self.position[node], node) for node in asked]
        heapify(waiting)
        while waiting and not (asked <= self.inside and [width] == [width_bytes(node) for node in self._leaving()]):
            _, node = heappop(waiting)
            if node not in self.inside and (node in asked or self._is_own(node)) and self._is_made(node):
                self.inside.add(node)
                later = () if sums_rows(node) else readers(node)
                for user in later:
                    heappush(waiting, (self.position[user], user))
        leaving = self._leaving()  # whose sums are of what lies before the region
        self.inside |= {u for node in self.inside.difference(leaving) for u in readers(node) if self._is_sum(u)}
        is_narrow = all(width_bytes(node) <= most for node in leaving)
        return self.inside if is_narrow and asked <= self.inside else None

    def _is_own(self, node: fx.Node) -> bool:
        """Return whether an op adds none of its tensors to others: what a product gives may be a sum's term on each
        device, which the gradient of a residual beside the region is not."""
        return node.target is not aten.add.Tensor or all(a in self.inside for a in rows_read(node))

    def _is_made(self, node: fx.Node) -> bool:
        """Return whether an op makes rows, or adds them up, of what is inside or there; what it needs besides, and
        nobody else reads, comes inside with it."""
        if node.meta.get("phase") != "backward" or not (is_row_wise(node) or sums_rows(node)):
            return False
        more = [a for a in rows_read(node) if a not in self.inside and _key(a) not in self.names]
        if not all(readers(a) == [node] and self._is_made(a) for a in more):
            return False
        self.inside.update(more)
        self.inside.update(results_of(node))
        return True

    def _is_sum(self, node: fx.Node) -> bool:
        return sums_rows(node) and all(a in self.inside or _key(a) in self.names for a in rows_read(node))

    def _leaving(self) -> list[fx.Node]:
        """Return the ops whose rows are read outside, but by sums of them."""
        rows = [node for node in self.inside if not sums_rows(node)]
        return [node for node in rows if any(u not in self.inside and not self._is_sum(u) for u in readers(node))]
