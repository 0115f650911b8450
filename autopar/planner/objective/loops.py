"""Decide which collectives of a finished plan go round beside the products that they feed or sum up.

A gather of activations along rows goes round if products read what it gives: those whose weights are there when the
gathered tensor is first read. A reduce-scatter along rows goes round if it adds up what a product gives, or a sum of
several that nothing else reads. Prices are those of autopar/cost/loop.py; "auto" takes what gains by them, within the
closest links, where collectives run beside compute. A product is in one loop at most: one that reads a gathered tensor
is not also beside a reduce-scatter.

The plan is searched for without loops. A transfer that goes round is charged with what its loop takes more than the
products do by themselves, so that the played step has the loop in it; the bound is of plans without loops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import fx

from ..._torch import aten
from ...cost.compute import COMPILED, FREE, GAP_SECONDS
from ...cost.loop import LoopCost
from ...errors import StrategyError
from ...hardware.schema import Hardware
from ...ir.casts import CAST
from ...ir.graph import is_tensor
from ...ir.layout import largest_local_numel
from ...ir.mesh import Mesh
from ...ops import ROW_PRODUCTS
from ...plans.sharding import Loop
from ..problem.problem import Problem
from ..problem.vertices import STATE, Vertex
from .checkpoint_blocks import recomputed_vertices
from .checkpoint_min_cut import key_of
from .evaluate import Evaluation, Looped, Transfer

NEVER, AUTO, ALWAYS = LOOPS = ("never", "auto", "always")


def check(loops: str) -> None:
    """Raise StrategyError for a word that says nothing of loops."""
    if loops not in LOOPS:
        raise StrategyError(f"no loops {loops!r} are known", fix=f"use {', '.join(LOOPS)}")


@dataclass(frozen=True)
class Site:
    """A transfer that can go round along `axis`, by blocks of `dim`, beside `products`; `sums`: ops that add those up,
    which the loop does instead. `is_joined`: whether others read what is gathered."""

    axis: str
    dim: int
    products: tuple[int, ...]
    sums: tuple[int, ...]
    is_joined: bool


def looped(problem: Problem, e: Evaluation, loops: str, hardware: Hardware, around: Mesh, execution: str) -> Evaluation:
    """Return the evaluation of a plan with its loops; `around`: the mesh on which distances are measured."""
    if loops == NEVER or problem.tiled:
        return e
    if loops == AUTO and not hardware.overlap_gain:
        return e
    launch = min(hardware.launch_seconds, GAP_SECONDS) if execution == COMPILED else hardware.launch_seconds
    sites, transfers = _Sites(problem, e), []
    for t in e.transfers:
        site = sites.of(t)
        if site is not None:
            cost = LoopCost(hardware, problem.mesh, around, launch, site.axis)
            charged = sites.charged_seconds(t, site, cost)
            if loops == ALWAYS or cost.is_near and charged < t.seconds:
                t = replace(t, seconds=charged, looped=Looped(t.seconds - charged))
        transfers.append(t)
    return replace(e, transfers=transfers)


def loops_of(problem: Problem, e: Evaluation) -> tuple[Loop, ...]:
    """Return the loops of a plan of the whole graph, as the lowering reads them."""
    sites = _Sites(problem, e)
    return tuple(
        Loop(
            t.redistribution.steps[0].move.kind,
            _name(problem.vertices[t.producer], t.output),
            t.target,
            t.phase,
            tuple(problem.vertices[v].node.name for v in site.products),
        )
        for t in e.transfers
        if t.looped and (site := sites.of(t)) is not None
    )


def _name(vertex: Vertex, output: int) -> str:
    """Return the name of the node that is one output of a vertex."""
    node, index = vertex.tensor(output)
    if is_tensor(node):
        return node.name
    return next(user.name for user in node.users if user.args[1] == index)


class _Sites:
    """Finds the transfers of a plan that can go round."""

    def __init__(self, problem: Problem, e: Evaluation):
        self.problem, self.e = problem, e
        self.transfers = Counter((t.producer, t.output) for t in e.transfers)
        self.moved_again = {key_of(t) for t in e.recompute_transfers}
        self.made_again = set(recomputed_vertices(e))

    def of(self, t: Transfer) -> Site | None:
        """Return how a transfer can go round, None if it cannot."""
        steps = t.redistribution.steps
        if t.is_hidden or len(steps) != 1 or any(self._kind(c) == "parameter" for c in t.consumers):
            return None
        move = steps[0].move
        if move.dim is None or move.dim + 1 == len(t.target.dims):  # it does not move rows
            return None
        if len(move.axes) != 1 or move.parts != 1 or self.problem.mesh.size(move.axes[0]) == 1:
            return None
        if key_of(t) in self.moved_again:  # the backward shares the copy with what it computes again
            return None
        if move.kind == "all_gather":
            return self._gathered(t, move.axes[0], move.dim)
        if move.kind == "reduce_scatter" and move.reduction == "sum":
            return self._reduced(t, move.axes[0], move.dim)
        return None

    def charged_seconds(self, t: Transfer, site: Site, cost: LoopCost) -> float:
        """Return what a loop takes more than its products by themselves, and the ops that add them up."""
        problem, choice = self.problem, self.e.choice
        chosen = {v: problem.choices(v).strategies[choice[v]] for v in site.products}
        block = sum(cost.block_seconds(problem.vertices[v].node, s, site.dim) for v, s in chosen.items())
        value = problem.vertices[t.producer].values[t.output]
        is_sum = t.redistribution.steps[0].move.kind == "reduce_scatter"
        part, whole = (t.target, t.source) if is_sum else (t.source, t.target)
        part_bytes, whole_bytes = (
            largest_local_numel(value.shape, x, problem.mesh) * value.element_size() for x in (part, whole)
        )
        is_copied = site.is_joined and site.dim == 0  # elsewhere the collective puts its blocks in order by a copy, too
        seconds = cost.seconds(block, part_bytes, is_sum, whole_bytes if is_copied else 0.0)
        alone = sum(float(problem.choices(v).seconds[choice[v]]) for v in (*site.products, *site.sums))
        return max(0.0, seconds - alone)

    def _kind(self, v: int) -> str:
        return self.problem.vertices[v].kind

    def _gathered(self, t: Transfer, axis: str, dim: int) -> Site | None:
        vertices, readers = self.problem.vertices, set(t.consumers)
        ops = [c for c in readers if self._kind(c) == "op"]
        if not ops or self._kind(t.producer) == "parameter":
            return None
        first = min(ops)
        products = tuple(c for c in sorted(ops) if self._multiplies(vertices[c], t, first))
        kept = (t.producer, t.output, t.target) in self.e.retained
        return Site(axis, dim, products, (), kept or len(products) < len(readers)) if products else None

    def _multiplies(self, reader: Vertex, t: Transfer, first: int) -> bool:
        """Return whether an op multiplies the rows of a gathered tensor with a weight that is there when the vertex
        `first` reads it."""
        here = (t.producer, t.output)
        is_product = reader.node.target in ROW_PRODUCTS and reader.inputs[0] == here != reader.inputs[1]
        return is_product and self._is_early(self.problem.vertices[reader.inputs[1][0]], first)

    def _is_early(self, vertex: Vertex, first: int) -> bool:
        if vertex.kind != "op" or vertex.index < first:
            return True
        is_light = vertex.node.target in FREE or vertex.node.target is CAST
        return is_light and all(self._is_early(self.problem.vertices[p], first) for p, _ in vertex.inputs)

    def _reduced(self, t: Transfer, axis: str, dim: int) -> Site | None:
        producer, uses = self.problem.vertices[t.producer], self.problem.uses_of[t.producer, t.output]
        if self.transfers[t.producer, t.output] > 1 or any(self._wanted(use) != t.target for use in uses):
            return None
        found = list(self._summands(producer))
        if None in found:
            return None
        tree = [v for v in found if v is not None]
        again = self.made_again.intersection(v.index for v in tree)
        if again and len(again) < len(tree):  # the backward may read what is inside
            return None
        products = tuple(v.index for v in tree if v.node.target in ROW_PRODUCTS)
        return Site(axis, dim, products, tuple(v.index for v in tree if v.index not in products), False)

    def _wanted(self, use):
        strategy = self.problem.choices(use.consumer).strategies[self.e.choice[use.consumer]]
        return strategy.outputs[0] if use.slot == STATE else strategy.inputs[use.slot]

    def _summands(self, vertex: Vertex) -> Iterator[Vertex | None]:
        """Iterate over the products that a vertex adds up, and the ops that do, all in one layout; over None if
        something else is among them."""
        strategy = self._strategy(vertex)
        if vertex.kind != "op" or vertex.casts:
            yield None
        elif vertex.node.target in ROW_PRODUCTS:
            source = self._strategy(self.problem.vertices[vertex.inputs[0][0]])
            is_there = source.outputs[vertex.inputs[0][1]] == strategy.inputs[0]
            yield vertex if is_there else None
        elif _adds(vertex.node) and len(vertex.inputs) == 2:
            yield vertex
            for slot, (p, output) in enumerate(vertex.inputs):
                one = self.problem.vertices[p]
                alone = len(self.problem.uses_of[p, output]) == 1
                same = self._strategy(one).outputs[output] == strategy.inputs[slot] == strategy.outputs[0]
                like = [(v.values[0].shape, v.values[0].dtype) for v in (one, vertex)]
                yield from self._summands(one) if alone and same and like[0] == like[1] else (None,)
        else:
            yield None

    def _strategy(self, vertex: Vertex):
        return self.problem.choices(vertex.index).strategies[self.e.choice[vertex.index]]


def _adds(node: fx.Node) -> bool:
    return node.target is aten.add.Tensor and not node.kwargs
