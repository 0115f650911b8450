"""Calls that differ in the sizes of some dims alone (a length, a last batch, or both), and the programs that follow
them.

Three things make a program right for sizes that it was not made of:

* every number in it lies on a line over the sizes (codegen/follow_size.py);
* a line is what shards have for sizes that leave the same remainder: those of all sharded dims are compared;
* the user's code takes the same way: torch traces it once more with the sizes left open, and says under which
  conditions, and all numbers of that trace lie on their lines at the new sizes.

A family is all calls for which the last holds: their joint graphs follow from those of a few. It has a program for each
set of remainders.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, islice
from typing import Any

import torch
from torch import fx

from .._torch import OpenSizes
from ..codegen.follow_size import Differs, Factor, Line, Sizes, follow, is_sure
from ..codegen.sized_graphs import SizedGraphs
from ..frontend.call_signature import CallSignature
from ..frontend.export import Captured
from ..ir.graph import fingerprint, is_op, tensor_arguments, tensor_of, values_of
from ..ir.layout import Layout
from ..plans.plan import Plan
from ..plans.sharding import Sharding
from .capture import Capture, Point, Traced
from .following_pipeline import SizedPipeline
from .pipeline_step import PipelineStep
from .shard_shifts import least_of, shifts_of
from .sized_calls import Dims, differing_dims, partners, resized, sizes_in
from .step import Step

MOST_TRIED, MOST_SHIFTS = 100, 64  # sets of points, and shifts of a size
STATE = ("parameters", "gradients", "optimizer", "buffers", "gathered parameters kept", "gathered parameters")


@dataclass(frozen=True)
class Sharded:
    """A dim that is sharded and changes with the sizes: its own size is `total` of them, and it is cut into `parts`
    stretches over axes with `count` devices."""

    total: Line
    parts: int
    count: int

    def remainder(self, sizes: Sizes) -> int | None:
        """Return what is left over when the dim is cut; None if some device would have nothing of it."""
        if not self.total.serves(sizes) or self.total.whole(sizes) % self.parts:
            return None
        length = self.total.whole(sizes) // self.parts
        return length % self.count if -(-length // self.count) * (self.count - 1) < length else None


def sharded_dims(captures: Mapping[Sizes, Captured], sharding: Sharding) -> frozenset[Sharded]:
    """Return the dims that change with the sizes of captures that are planned alike, and are sharded somewhere. Raises
    Differs where they change in another way than on a line."""
    graphs = {sizes: list(captured.graph.nodes) for sizes, captured in captures.items()}
    if len({len(nodes) for nodes in graphs.values()}) > 1:
        raise Differs("the captures have other ops at other sizes")
    layouts = _layouts(graphs[max(graphs)], sharding)
    found = set()
    for nodes in zip(*graphs.values()):
        values = {sizes: values_of(node) for sizes, node in zip(graphs, nodes)}
        name = dict(zip(graphs, nodes))[max(graphs)].name
        shapes = follow({sizes: [list(v.shape) for v in value] for sizes, value in values.items()})
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


def fits_memory(plan: Plan, planned: Sizes, sizes: Sizes) -> bool:
    """Return whether a plan for some sizes fits the memory at others: what is no state grows with the square of each at
    most."""
    state = sum(plan.at_peak.get(kind, 0.0) for kind in STATE)
    growth = math.prod(max(size / before, 1.0) ** 2 for size, before in zip(sizes, planned))
    return growth == 1.0 or state + (plan.peak_bytes - state) * growth <= plan.memory_limit_bytes


def nearest(captures: Sequence[Capture], state: tuple, traced: Traced) -> Capture | None:
    """Return a capture whose plan a call that was traced can have, since they differ in sizes alone, if there is
    one."""
    for capture in reversed(captures):
        may_follow = capture.plan.pipeline.is_one_program and not capture.follows_size and capture.state == state
        found = differing_dims(capture.traced.captured.signature, traced.captured.signature) if may_follow else None
        if found is not None and fits_memory(capture.plan, *found[1:]):
            return capture
    return None


@dataclass(frozen=True)
class Program:
    """A program for calls that leave the remainders of two or three `points`, of which it was made."""

    step: Any  # a Step or a SizedPipeline
    lines: frozenset[Line]
    sharded: frozenset[Sharded]
    points: Mapping[Sizes, Point]

    @classmethod
    def of(cls, points: Mapping[Sizes, Point], batch: int | None) -> Program:
        """Return the program that follows from those of some points; `batch`: the place of the number of samples among
        the sizes. Raises Differs."""
        steps: dict[Sizes, Any] = {sizes: point.step for sizes, point in points.items()}
        step, lines = (SizedPipeline if isinstance(steps[max(steps)], PipelineStep) else Step).following(steps)
        sharded = set().union(*(sharded_dims(graphs, sharding) for graphs, sharding in _planned(points)))
        micro_batches = points[max(points)].plan.micro_batches
        if batch is not None and micro_batches > 1:
            sharded.add(Sharded(Line((Factor(batch),), 1, 1, "int", 1), 1, micro_batches))
        made = cls(step, lines, frozenset(sharded), points)
        if not all(map(made.serves, points)):
            raise Differs("shards leave other remainders at other sizes")
        return made

    def serves(self, sizes: Sizes) -> bool:
        """Return whether the program is that of a call of the family of these sizes."""
        known = max(self.points)
        is_alike = all(dim.remainder(sizes) == dim.remainder(known) for dim in self.sharded)
        return is_alike and all(line.serves(sizes) for line in self.lines)


def _planned(points: Mapping[Sizes, Point]) -> Iterator[tuple[dict[Sizes, Captured], Sharding]]:
    """Return the graphs of which plans decide, those of micro-batches where there are some, with the decisions."""
    sharding = points[max(points)].plan.sharding
    if all(isinstance(point.step, Step) for point in points.values()):
        yield {sizes: point.traced.captured for sizes, point in points.items()}, sharding
        return
    micro = {sizes: point.step.micro for sizes, point in points.items()}
    if len({m.smaller is None for m in micro.values()}) > 1:
        raise Differs("micro-batches are equal at one size and not at another")
    yield {sizes: m.captured for sizes, m in micro.items()}, sharding
    if micro[max(micro)].smaller is not None:
        yield {sizes: m.smaller for sizes, m in micro.items()}, sharding


@dataclass
class Family:
    """All calls that are like that of `base` but for the sizes of some `dims`, and their programs. Rank 0 alone has
    what the user's code says of them, `opened`, and the lines of the numbers there. `batch`: the place of the number of
    samples among the sizes; `period`: sizes that differ by a multiple of it leave the same remainders, mostly;
    `failed`: sizes for which no program was found."""

    dims: Dims
    base: Capture
    graphs: SizedGraphs
    opened: OpenSizes | None
    traced: Sequence[Line | int]
    batch: int | None
    period: int
    points: dict[Sizes, Point]
    programs: list[Program] = field(default_factory=list)
    failed: set[Sizes] = field(default_factory=set)

    @property
    def signature(self) -> CallSignature:
        """Return the form of the base's call."""
        return self.base.traced.captured.signature

    def sizes(self, signature: CallSignature) -> Sizes | None:
        """Return the sizes of a call of global shapes if it is of the family."""
        sizes = sizes_in(signature, self.signature, self.dims)
        return sizes if sizes is not None and self.holds(sizes) and self._fits(sizes) else None

    def holds(self, sizes: Sizes) -> bool:
        """Return whether the user's code computes as at the base at some sizes."""
        if not all(line.serves(sizes) for line in self.graphs.lines):
            return False
        if self.opened is None:
            return True
        if not self.opened.holds(sizes):
            return False
        pairs = zip(self.traced, self.opened.numbers(sizes))
        return all(
            line.serves(sizes) and line.whole(sizes) == n if isinstance(line, Line) else line == n for line, n in pairs
        )

    def _fits(self, sizes: Sizes) -> bool:
        planned = sizes_in(self.base.planned_for, self.signature, self.dims) or sizes_in(
            self.signature, self.signature, self.dims
        )
        return planned is None or fits_memory(self.base.plan, planned, sizes)

    def at(self, sizes: Sizes) -> Traced:
        """Return the capture of a call of the family."""
        module = self.graphs.at(sizes)
        captured = replace(
            self.base.traced.captured,
            graph_module=module,
            compact=None,
            signature=resized(self.signature, self.dims, sizes),
        )
        return Traced(captured, self.base.traced.fixed, fingerprint(module.graph))

    def points_for(self, sizes: Sizes, count: int) -> list[Sizes] | None:
        """Return so many sizes that leave the remainders of some, and tell lines apart; those that are lowered already
        come first. None if there are not as many."""
        mesh, micro_batches = self.base.plan.mesh, self.base.plan.micro_batches
        ways = [n for n in mesh.sizes if n > 1]
        parts = [micro_batches if place == self.batch else 1 for place in range(len(sizes))]
        shifts = [shifts_of(n, ways, of) for n, of in zip(sizes, parts)]
        if any(len(of) > MOST_SHIFTS for of in shifts):
            return None
        least = [least_of(n, ways, of) for n, of in zip(sizes, parts)]
        far = tuple(n + self.period * max(0, math.ceil((low - n) / self.period)) for n, low in zip(sizes, least))
        alike = [p for p in self.points if all((a - b) % self.period == 0 for a, b in zip(p, sizes))]
        candidates = [
            p
            for p in dict.fromkeys((*alike, sizes, far, *partners(far, self.period)))
            if all(n >= low for n, low in zip(p, least)) and self.holds(p)
        ]
        for tells_all in (True, False):
            for chosen in islice(combinations(candidates, count), MOST_TRIED):
                if is_sure(chosen, shifts, tells_all):
                    return list(chosen)
        return None


def lines_of(opened: OpenSizes, points: Sequence[Sizes]) -> Sequence[Line | int]:
    """Return the lines of the numbers in the user's code through some points. Raises Differs."""
    if not all(map(opened.holds, points)):
        raise Differs("the user's code takes another way at one of the sizes")
    return follow({sizes: opened.numbers(sizes) for sizes in points})
