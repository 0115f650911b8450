"""Find which scheme cuts the sequence of each attention of a plan, what a device computes of it, and what that sends.

An axis that cuts queries and keys alike makes a ring, one that cuts queries alone has keys and values gathered. One
that cuts heads exchanges them for rows (Ulysses) if an all-to-all over it lies between the attention and the products
around it; if none does the products make heads cut already, as in Megatron.

Attention that is written out as products and a softmax over scores (b, h, s, t), in a module of its own, is one too:
where its rows are cut, keys and values are gathered.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import fx

from ...cost.compute import FREE
from ...cost.products import PRODUCTS
from ...cost.ring import ATTENTION, ring_of
from ...ir.layout import ZIGZAG, Layout, dim_ranges
from ...ir.mesh import SEQUENCE_AXIS, Mesh
from ...ops import autopar
from ...plans.attentions import WHOLE, AttentionScheme
from ...rules import Strategy
from ...rules.layers import ring_axes
from ...rules.reading import bound, tensors_by_name
from ...utils.format import count_text, size
from ..objective.evaluate import Evaluation, Transfer
from ..objective.module_table import module_of, row_of
from ..problem.problem import Problem
from ..problem.vertices import Vertex

aten = torch.ops.aten
FORWARD = autopar.attention.default
RING, GATHERED, EXCHANGED, HEADS = "ring", "all_gather_kv", "ulysses", "heads"
SOFTMAXES = (aten._softmax.default, aten._safe_softmax.default)
PRODUCTS_OR_ATTENTION = {*PRODUCTS, *ATTENTION}
OF_SCORES = {autopar.matmul.default, aten.bmm.default}  # inside of attention that is written out


@dataclass(frozen=True)
class Cut:
    """The axes of an attention by what they do to it; `zigzag`: whether queries are cut so."""

    ring: tuple[str, ...]
    gathered: tuple[str, ...]
    exchanged: tuple[str, ...]
    heads: tuple[str, ...]
    zigzag: bool
    is_written: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        """Return the axes that cut the sequence around the attention."""
        return (*self.ring, *self.gathered, *self.exchanged)

    @property
    def text(self) -> str:
        """Return the scheme in words: `ring over cp in zigzag + ulysses over up`."""
        zigzag = " in zigzag" if self.zigzag else ""
        parts = [
            f"{name} over {','.join(axes)}{how}"
            for name, axes, how in (
                (RING, self.ring, zigzag),
                (GATHERED, self.gathered, zigzag),
                (EXCHANGED, self.exchanged, ""),
                (HEADS, self.heads, ""),
            )
            if axes
        ]
        return (" + ".join(parts) or WHOLE) + (", written out" if self.is_written else "")


def schemes_of(problem: Problem, e: Evaluation, micro_batches: int) -> tuple[AttentionScheme, ...]:
    """Return the attentions of a plan of so many passes a step, equal ones together, in order of the graph; nothing if
    none has its sequence cut and no axis of the mesh is named for that."""
    plan = _Plan(problem, e)
    if SEQUENCE_AXIS not in problem.mesh.names and not plan.may_cut:
        return ()
    found: dict[tuple, AttentionScheme] = {}
    for v in plan.forwards + plan.written:
        cut, copies = plan.cut(v), problem.copies(e.first)[v.index]
        largest, mean = pairs(v.node, plan.strategy(v), problem.mesh)
        name, sent = row_of(module_of(v)), copies * micro_batches * plan.ring_bytes(v) + plan.moved_bytes(v, cut)
        one = AttentionScheme(name, copies, cut.text, largest, largest / mean if mean else 1.0, sent)
        key = (name, cut, largest, mean, round(sent / copies))
        if known := found.get(key):
            one = replace(one, copies=known.copies + copies, sent_bytes=known.sent_bytes + sent)
        found[key] = one
    is_cut = any(cut.axes for _, cut, *_ in found)
    return tuple(found.values()) if is_cut or SEQUENCE_AXIS in problem.mesh.names else ()


def cuts_of(problem: Problem, e: Evaluation) -> list[Cut]:
    """Return how each attention of a plan is cut, equal ones once."""
    plan = _Plan(problem, e)
    return list(dict.fromkeys(map(plan.cut, plan.forwards)))


def scheme_text(problem: Problem, e: Evaluation, v: Vertex) -> str:
    """Return what cuts a vertex that is an attention, and what that makes a device compute and send in a pass; "" of
    any other."""
    if v.kind != "op" or v.node.target is not FORWARD:
        return ""
    plan = _Plan(problem, e)
    cut, (most, mean) = plan.cut(v), pairs(v.node, plan.strategy(v), problem.mesh)
    sent = plan.ring_bytes(v) + plan.moved_bytes(v, cut)
    return (
        f"{cut.text}; {count_text(round(most))} pairs of queries and keys on the device that has most, "
        f"{most / mean if mean else 1.0:.2f} of the mean; sends {size(sent)}"
    )


def pairs(node: fx.Node, strategy: Strategy, mesh: Mesh) -> tuple[float, float]:
    """Return the pairs of a query and a key that an attention computes, by head and sample: on the device that has most
    to do, and on average. A causal mask leaves out the keys behind a query, a window those that are not in it; other
    masks leave out nothing, nor does what is written out."""
    if node.target in SOFTMAXES:
        return _dealt_out(node.meta["val"].shape, strategy.outputs[0], mesh, float(node.meta["val"].shape[-1]).__mul__)
    given = bound(node)
    q, k = (given[name].meta["val"].shape for name in ("q", "k"))
    layout = strategy.inputs[_query(node)]
    first, window = int(given["first"] or 0), int(given["window"])
    in_front = 1 if given["causal"] else window or q[2] + k[2]  # keys from a query's own on

    def before(row: int) -> float:
        ends = _clipped(first + in_front, row, k[2])
        return ends - (_clipped(first - window + 1, row, k[2]) if window else 0.0)

    return _dealt_out(q, layout, mesh, before)


def _clipped(start: int, count: int, most: int) -> float:
    """Return the sum of so many numbers that follow one another from `start`, none counted below 0 or above `most`."""
    low, high = min(max(start, 0), most), min(max(start + count, 0), most)
    return (high - low) * (low + high - 1) / 2 + max(0, start + count - max(start, most)) * float(most)


def _dealt_out(shape: Sequence[int], layout: Layout, mesh: Mesh, before: Callable[[int], float]) -> tuple[float, float]:
    """Return the most and the mean of what devices have of samples, heads and rows; `before`: the pairs of a head in
    the rows before one."""
    most = mean = 1.0
    for dim, of_rows in ((0, float), (1, float), (2, before)):
        work = [
            sum(of_rows(stop) - of_rows(start) for start, stop in ranges)
            for ranges in _shards(shape[dim], layout.dims[dim], layout.parts[dim], mesh)
        ]
        most, mean = most * max(work), mean * sum(work) / len(work)
    return most, mean


def _shards(size: int, axes: Sequence[str], parts: int, mesh: Mesh) -> Iterator[list[tuple[int, int]]]:
    """Iterate over the ranges of a dim that each device along its axes has."""
    for places in itertools.product(*(range(mesh.size(axis)) for axis in axes)):
        yield dim_ranges(size, axes, parts, mesh, dict(zip(axes, places))) if axes else [(0, size)]


def _is_written(v: Vertex) -> bool:
    """Return whether a vertex is a softmax over scores of an attention."""
    is_softmax = v.node.target in SOFTMAXES and v.phase == "forward"
    return is_softmax and len(v.values[0].shape) == 4 and bool(module_of(v))


def _is_inside(v: Vertex, module: str) -> bool:
    return not module or f"{module_of(v)}.".startswith(f"{module}.")


def _query(node: fx.Node) -> int:
    """Return which tensor argument of an attention its queries are."""
    return list(tensors_by_name(node)).index("q")


class _Plan:
    """An evaluated plan, with what lies between attentions and the products around them."""

    def __init__(self, problem: Problem, e: Evaluation):
        self.problem, self.e = problem, e
        self.forwards = [v for v in problem.vertices if v.kind == "op" and v.node.target is FORWARD]
        self.written = [v for v in problem.vertices if v.kind == "op" and _is_written(v)]
        self._regions: dict[int, frozenset[int]] = {}

    def strategy(self, v: Vertex) -> Strategy:
        """Return what a vertex chose."""
        return self.problem.choices(v.index).strategies[self.e.choice[v.index]]

    @property
    def may_cut(self) -> bool:
        """Return whether the sequence of an attention may be cut: its rows are, or its heads over an axis with
        all-to-alls."""
        steps = (step for t in self.e.every_transfer for step in t.redistribution.steps)
        exchanged = {axis for step in steps if step.move.kind == "all_to_all" for axis in step.move.axes}
        queries = (self._queries(v) for v in self.forwards + self.written)
        return any(q.dims[2] or exchanged.intersection(q.dims[1]) for q in queries)

    def cut(self, v: Vertex) -> Cut:
        """Return what cuts an attention; axes of one device cut nothing."""
        q, size, is_written = self._queries(v), self.problem.mesh.size, v.node.target in SOFTMAXES
        heads, rows = ([axis for axis in q.dims[dim] if size(axis) > 1] for dim in (1, 2))
        round_ = () if is_written else ring_axes(v.node, self.strategy(v).inputs)
        ring = tuple(axis for axis in round_ if size(axis) > 1)
        exchanged = tuple(axis for axis in heads if axis in self._exchanges(v))
        return Cut(
            ring,
            tuple(axis for axis in rows if axis not in ring),
            exchanged,
            tuple(axis for axis in heads if axis not in exchanged),
            q.parts[2] == ZIGZAG,
            is_written,
        )

    def _queries(self, v: Vertex) -> Layout:
        """Return the layout of the queries of an attention, or of its scores, whose first dims are the same."""
        strategy = self.strategy(v)
        return strategy.outputs[0] if v.node.target in SOFTMAXES else strategy.inputs[_query(v.node)]

    def ring_bytes(self, v: Vertex) -> float:
        """Return the bytes of blocks of keys, values and their gradients that a device sends in a pass."""
        found = (ring_of(one.node, self.strategy(one), self.problem.mesh) for one in self._both(v))
        return sum(ring.sent_bytes for ring in found if ring)

    def moved_bytes(self, v: Vertex, cut: Cut) -> float:
        """Return the bytes that a device sends in a step over the axes that cut the sequence, to and from an attention
        and its gradient."""
        return sum(
            step.wire_fraction * t.bytes_ * t.times
            for t in self._transfers(v)
            for step in t.redistribution.steps
            if step.move.kind != "slice" and {*step.move.axes} <= {*cut.axes}
        )

    def _exchanges(self, v: Vertex) -> set[str]:
        """Return the axes over which an all-to-all lies between an attention and the products around it."""
        steps = (step for t in self._transfers(v) for step in t.redistribution.steps)
        return {axis for step in steps if step.move.kind == "all_to_all" for axis in step.move.axes}

    def _transfers(self, v: Vertex) -> list[Transfer]:
        region = self._region(v)
        near = {i: t for r in region for i, t in self._transfers_of.get(r, ())}
        return [t for _, t in sorted(near.items())]

    @cached_property
    def _transfers_of(self) -> Mapping[int, list[tuple[int, Transfer]]]:
        """Return by vertex the transfers of what it makes or reads, but for parameters and their gradients."""
        found: dict[int, list[tuple[int, Transfer]]] = {}
        for i, t in enumerate(self.e.every_transfer):
            ends = {t.producer, *t.consumers}
            if all(self.problem.vertices[end].kind == "op" for end in ends):
                for end in ends:
                    found.setdefault(end, []).append((i, t))
        return found

    @cached_property
    def _readers(self) -> Mapping[int, list[int]]:
        found: dict[int, list[int]] = {}
        for use in self.problem.uses:
            found.setdefault(use.producer, []).append(use.consumer)
        return found

    def _both(self, v: Vertex) -> list[Vertex]:
        """Return an attention and the op of its gradient, if there is one."""
        readers = [self.problem.vertices[r] for r in dict.fromkeys(self._readers.get(v.index, ()))]
        return [
            v,
            *(r for r in readers if r.kind == "op" and r.node.target in ATTENTION and r.node.target is not FORWARD),
        ]

    def _region(self, v: Vertex) -> frozenset[int]:
        """Return the ops between an attention, with its gradient, and the products around it: on the side of queries,
        keys and values whatever lies there in the attention's module, on that of its output views alone."""
        if v.index not in self._regions:
            both = self._both(v)
            region = self._in_module(v) if v.node.target in SOFTMAXES else {one.index for one in both}
            for one in both:
                is_forward = one.node.target is FORWARD
                self._walk(one, region, True, is_forward)
                self._walk(one, region, False, not is_forward)
            self._regions[v.index] = frozenset(region)
        return self._regions[v.index]

    def _in_module(self, v: Vertex) -> set[int]:
        """Return the ops of a module that are no products with its weights."""
        return {
            w.index
            for w in self.problem.vertices
            if w.kind == "op" and _is_inside(w, module_of(v)) and w.node.target not in PRODUCTS_OR_ATTENTION - OF_SCORES
        }

    def _walk(self, start: Vertex, region: set[int], up: bool, to_keys: bool) -> None:
        """Add the ops before (`up`) or behind an op to a region; `to_keys`: on the side of queries, keys and values."""
        waiting, module = [start.index], module_of(start)
        while waiting:
            v = self.problem.vertices[waiting.pop()]
            for other in [p for p, _ in v.inputs] if up else self._readers.get(v.index, ()):
                w = self.problem.vertices[other]
                if other in region or w.kind != "op" or w.node.target in PRODUCTS_OR_ATTENTION:
                    continue
                if w.node.target in FREE or to_keys and _is_inside(w, module):
                    region.add(other)
                    waiting.append(other)
