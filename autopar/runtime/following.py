"""Calls that differ in one size alone (a length, a last batch), and the programs that follow it.

Three things make a program right for a size that it was not made of:

* every number in it lies on a line over the size (codegen/follow_size.py);
* a line is what shards have for sizes that leave the same remainder: those of all sharded dims are compared;
* the user's code takes the same way: torch traces it once more with the size left open, and says under which
  conditions, and all numbers of that trace lie on their lines at the new size.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import fx

from .._torch import OpenSize
from ..codegen.follow_size import Differs, Line, follow
from ..frontend.call_signature import CallSignature
from ..frontend.export import Captured
from ..ir.graph import is_op, tensor_arguments, tensor_of, values_of
from ..ir.layout import Layout
from ..plans.plan import Plan
from ..plans.sharding import Sharding
from .step import Step

if TYPE_CHECKING:
    from .capture import Capture, Traced

FEWEST, MOST = 2, 3  # captures of a program that follows a size
STATE = ("parameters", "gradients", "optimizer", "buffers", "gathered parameters kept", "gathered parameters")

Dims = Mapping[str, tuple[int, ...]]  # of inputs, by name


def differing_dims(a: CallSignature, b: CallSignature) -> tuple[Dims, int, int] | None:
    """Return the dims in which two calls differ, with the one size that these have in each; None if they differ in
    anything else, or not at all."""
    if (a.spec, a.names, a.dtypes, a.differentiated, a.values) != (
        b.spec, b.names, b.dtypes, b.differentiated, b.values,
    ):  # fmt: skip
        return None
    dims: dict[str, tuple[int, ...]] = {}
    sizes: set[tuple[int, int]] = set()
    for name, one, other in zip(a.names, a.shapes, b.shapes):
        if one is None or other is None or one == other:
            continue
        if len(one) != len(other):
            return None
        dims[name] = tuple(d for d, (x, y) in enumerate(zip(one, other)) if x != y)
        sizes |= {(one[d], other[d]) for d in dims[name]}
    return (dims, *sizes.pop()) if len(sizes) == 1 else None


def size_of(signature: CallSignature, dims: Dims) -> int:
    """Return the size of the first of some dims in a call."""
    name, found = next(iter(dims.items()))
    return (signature.shape_of(name) or ())[found[0]]


@dataclass(frozen=True)
class Sharded:
    """A dim that is sharded and changes with the size: its own size is `total` of that, and it is cut into `parts`
    stretches over axes with `count` devices."""

    total: Line
    parts: int
    count: int

    def remainder(self, size: int) -> int | None:
        """Return what is left over when the dim is cut; None if some device would have nothing of it."""
        if not self.total.serves(size) or self.total.whole(size) % self.parts:
            return None
        length = self.total.whole(size) // self.parts
        return length % self.count if -(-length // self.count) * (self.count - 1) < length else None


def sharded_dims(captures: Mapping[int, Captured], sharding: Sharding) -> frozenset[Sharded]:
    """Return the dims that change with the size of captures that are planned alike, and are sharded somewhere. Raises
    Differs where they change in another way than on a line."""
    graphs = {size: list(captured.graph.nodes) for size, captured in captures.items()}
    if len({len(nodes) for nodes in graphs.values()}) > 1:
        raise Differs("the captures have other ops at other sizes")
    layouts = _layouts(graphs[max(graphs)], sharding)
    found = set()
    for nodes in zip(*graphs.values()):
        values = {size: values_of(node) for size, node in zip(graphs, nodes)}
        name = dict(zip(graphs, nodes))[max(graphs)].name
        shapes = follow({size: [list(v.shape) for v in value] for size, value in values.items()})
        for at, shape in enumerate(shapes):
            for d, total in enumerate(shape):
                if isinstance(total, Line):
                    taken = [layout for layout in layouts.get((name, at), ()) if layout.dims[d]]
                    axes = {axis for layout in taken for axis in layout.dims[d]}
                    if axes:
                        parts = math.lcm(*(layout.parts[d] for layout in taken))
                        found.add(Sharded(total, parts, math.prod(map(sharding.mesh.size, axes))))
    return frozenset(found)


def _layouts(nodes: Sequence[fx.Node], sharding: Sharding) -> dict[tuple[str, int], set[Layout]]:
    """Return all layouts that a plan has for a tensor, by the node that makes it and which of its values it is."""
    found: dict[tuple[str, int], set[Layout]] = {}
    for node in nodes:
        if node.op in ("placeholder", "get_attr") and node.name in sharding.leaves:
            found.setdefault((node.name, 0), set()).add(sharding.leaves[node.name])
        if not is_op(node) or node.name not in sharding.nodes:
            continue
        decision = sharding.nodes[node.name]
        for at, layout in enumerate(decision.outputs):
            found.setdefault((node.name, at), set()).add(layout)
        for argument, layout in zip(tensor_arguments(node), decision.inputs):
            producer, index = tensor_of(argument)
            made = producer.meta["val"]
            at = sum(isinstance(v, torch.Tensor) for v in made[:index]) if isinstance(made, (tuple, list)) else 0
            found.setdefault((producer.name, at), set()).add(layout)
    for name, at, layout in sharding.kept:
        found.setdefault((name, at), set()).add(layout)
    return found


def fits_memory(plan: Plan, planned_size: int, size: int) -> bool:
    """Return whether a plan for one size fits the memory at another one: what is no state grows with its square at
    most."""
    state = sum(plan.at_peak.get(kind, 0.0) for kind in STATE)
    growth = max(size / planned_size, 1.0) ** 2
    return size <= planned_size or state + (plan.peak_bytes - state) * growth <= plan.memory_limit_bytes


@dataclass(frozen=True)
class Following:
    """A program for calls that differ in the size of some dims, made of captures at two or three `points`. Rank 0 alone
    has what the user's code says of it, `opened`, and the lines of the numbers there."""

    dims: Dims
    step: Step
    lines: frozenset[Line]
    sharded: frozenset[Sharded]
    opened: OpenSize | None
    traced: Sequence[Line | int]
    points: Mapping[int, Capture]

    @property
    def capture(self) -> Capture:
        """Return the largest of the captures that it was made of."""
        return self.points[max(self.points)]

    def size(self, signature: CallSignature) -> int | None:
        """Return the size of a call of global shapes if the program serves it."""
        found = differing_dims(self.capture.traced.captured.signature, signature)
        if found is None or found[0] != self.dims:
            return None
        size = found[2]
        if self.opened is not None and not (
            self._is_traced(self.opened, size) and _fits(self.capture, self.dims, size)
        ):
            return None
        is_alike = all(dim.remainder(size) == dim.remainder(max(self.points)) for dim in self.sharded)
        return size if is_alike and all(line.serves(size) for line in self.lines) else None

    def _is_traced(self, opened: OpenSize, size: int) -> bool:
        """Return whether the user's code computes at a size as it was captured."""
        if not opened.holds(size):
            return False
        pairs = zip(self.traced, opened.numbers(size))
        return all(
            line.serves(size) and line.whole(size) == n if isinstance(line, Line) else line == n for line, n in pairs
        )


def _fits(capture: Capture, dims: Dims, size: int) -> bool:
    return fits_memory(capture.plan, size_of(capture.planned_for, dims), size)


def nearest(captures: Sequence[Capture], state: tuple, traced: Traced) -> Capture | None:
    """Return a capture whose plan a call that was traced can have, since they differ in one size alone, if there is
    one."""
    for capture in reversed(captures):
        found = differing_dims(capture.traced.captured.signature, traced.captured.signature)
        may_follow = capture.plan.pipeline.is_one_program and not capture.follows_size and capture.state == state
        if found is not None and may_follow and _fits(capture, *found[::2]):
            return capture
    return None


def points_of(captures: Sequence[Capture]) -> tuple[Dims, dict[int, Capture]] | None:
    """Return the dims in which the last of some captures and others before it differ alone, and the last of them by
    their size; None if there are no others."""
    last = captures[-1]
    groups: dict[tuple, dict[int, Capture]] = {}
    for capture in reversed(captures[:-1]):
        found = differing_dims(last.traced.captured.signature, capture.traced.captured.signature)
        if found is None or capture.follows_size or not _are_alike(last, capture):
            continue
        dims, here, there = found
        group = groups.setdefault(tuple(sorted(dims.items())), {here: last})
        if _leave_one_remainder({here: last, there: capture}):
            group[there] = capture
        if len(group) == MOST:
            break
    key, group = max(groups.items(), key=lambda item: len(item[1]), default=((), {}))
    return (dict(key), group) if len(group) >= FEWEST else None


def _are_alike(a: Capture, b: Capture) -> bool:
    """Return whether two captures may be of one program but for a size."""
    return (
        a.state == b.state
        and a.traced.fixed == b.traced.fixed
        and a.returns == b.returns
        and [(leaf, shape, dtype) for _, leaf, shape, dtype in a.buffers]
        == [(leaf, shape, dtype) for _, leaf, shape, dtype in b.buffers]
        and a.plan.sharding == b.plan.sharding
    )


def _leave_one_remainder(points: Mapping[int, Capture]) -> bool:
    try:
        sharded = _sharded_dims(points)
    except Differs:
        return False
    return all(len({dim.remainder(size) for size in points} - {None}) == 1 for dim in sharded)


def _sharded_dims(points: Mapping[int, Capture]) -> frozenset[Sharded]:
    captured = {size: capture.traced.captured for size, capture in points.items()}
    return sharded_dims(captured, next(iter(points.values())).plan.sharding)


def following(dims: Dims, points: Mapping[int, Capture], trace: Callable[[Capture], OpenSize] | None) -> Following:
    """Return the program that follows the size of captures that `points_of` gave. `trace`: asked on rank 0 alone, for
    what the user's code says. Raises Differs if there is none, AutoparError if the code cannot be traced so."""
    points = {size: copy.copy(capture) for size, capture in points.items()}  # whatever these go on to
    largest = points[max(points)]
    step, lines = Step.following({size: capture.step for size, capture in points.items()})
    sharded, opened, traced = _sharded_dims(points), trace(largest) if trace is not None else None, ()
    if opened is not None:
        if not all(map(opened.holds, points)):
            raise Differs("the user's code takes another way at one of the sizes")
        traced = follow({size: opened.numbers(size) for size in points})
    return Following(dims, step, lines, sharded, opened, traced, points)
