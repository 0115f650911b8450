"""The prices of row-wise regions in pieces: the MLPs of a model (autopar/rules/row_regions.py).

The backward runs the ops again whose tensors it reads, which counts as its compute. Every piece launches every op, what
leaves a region is written piece by piece, and sums over rows go through memory once a piece.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import fx

from ...hardware.profile import Hardware
from ...ir.graph import bytes_of, tensor_arguments, tensor_of, values_of
from ...ir.layout import Layout, largest_local_numel, local_shape
from ...ops.row_pieces import pieces_of, share_of
from ...plans.tiled import TiledRegion
from ...rules import Strategy
from ...rules.query_regions import QueryRegion
from ...rules.row_regions import RowRegion, row_regions
from ...rules.row_wise import rows_read
from .problem import Problem

if TYPE_CHECKING:
    from ..objective.evaluate import Evaluation


Region = TypeVar("Region", bound=RowRegion)


def long_regions(graph: fx.Graph) -> tuple[RowRegion, ...]:
    """Return the regions of a graph that have more rows than a piece."""
    return tuple(r for r in row_regions(graph) if pieces_of(tuple(r.source.meta["val"].shape[:-1]))[1] > 1)


def regions(problem: Problem, taken: Collection[fx.Node]) -> tuple[RowRegion, ...]:
    """Return the regions of a problem that have none of the ops that are `taken`, and stand alone."""
    free = (region for region in long_regions(problem.graph) if not any(node in taken for node in region.ops))
    return standing_alone(problem, tuple(free))


def standing_alone(problem: Problem, found: tuple[Region, ...]) -> tuple[Region, ...]:
    """Return those of some regions all of whose ops decide together with none but those of others among them."""
    where = {v.node: v for v in problem.vertices if v.kind == "op"}
    while True:
        inside = {where[n].index for region in found for n in region.ops}

        def stands_alone(region: Region) -> bool:
            members = (problem.classes[where[n].cls].members for n in region.ops)
            return all(inside.issuperset(some) for some in members)  # noqa: B023

        left = tuple(region for region in found if stands_alone(region))
        if len(left) == len(found):
            return found
        found = left


def _own(problem: Problem) -> list[RowRegion]:
    """Return the regions in pieces that have no attention."""
    return [region for region in problem.tiled_rows if not isinstance(region, QueryRegion)]


def price(problem: Problem, hardware: Hardware) -> None:
    """Add to the seconds of the ops of a problem's regions what pieces take more, and let them read whole rows of the
    source and of the gradient that the backward starts from: then all of them read these in one layout, as no other
    tensor of a region moves."""
    where = {v.node: v for v in problem.vertices if v.kind == "op"}
    priced = set()
    for region in _own(problem):
        for node in region.ops:
            cls = where[node].cls
            if cls not in priced:
                priced.add(cls)
                options = problem.classes[cls]
                more = [_more_seconds(problem, hardware, region, node, s) for s in options.strategies]
                problem.classes[cls] = replace(options, seconds=options.seconds + np.array(more))
                ends = [i for i, a in enumerate(tensor_arguments(node)) if a in (region.source, region.gradient)]
                whole = np.array([not any(s.inputs[i].dims[-1] for i in ends) for s in options.strategies])
                problem.fits[cls] = problem.fits.get(cls, True) & whole


def _more_seconds(problem: Problem, hardware: Hardware, region: RowRegion, node: fx.Node, strategy: Strategy) -> float:
    """Return the seconds that an op of a region takes more under a strategy for running piece by piece."""
    argument = rows_read(node)[0]
    layout = strategy.inputs[tensor_arguments(node).index(argument)]
    _, count = pieces_of(_rows(problem, argument.meta["val"], layout))
    value = values_of(node)[0]
    held = largest_local_numel(value.shape, strategy.outputs[0], problem.mesh) * value.element_size()
    passes = 2 * (count - 1) if node in region.sums else 2 if node in (region.node, *region.results) else 0
    moved = held * passes if count > 1 else 0
    return (count - 1) * hardware.launch_seconds + moved / hardware.reached_memory_bytes_per_second


def _rows(problem: Problem, value: torch.Tensor, layout: Layout) -> tuple[int, ...]:
    """Return the leading sizes of a tensor on the device that holds most of it."""
    first = dict.fromkeys(problem.mesh.names, 0)
    return local_shape(tuple(value.shape), layout, problem.mesh, first)[:-1]


def share_of_piece(problem: Problem, vertex: int, output: int, layout: Layout) -> float:
    """Return the part of a tensor inside of a region that is there at a time."""
    return share_of(_rows(problem, problem.vertices[vertex].values[output], layout))


def described(problem: Problem, evaluation: Evaluation) -> tuple[TiledRegion, ...]:
    """Return what a plan says of each region: `bytes_` of what of the forward would wait for its backward."""
    where, found = {v.node: v.index for v in problem.vertices if v.kind == "op"}, []

    def chosen(node: fx.Node) -> Layout:
        producer, output = tensor_of(node)
        vertex = where[producer]
        return problem.choices(vertex).strategies[evaluation.choice[vertex]].outputs[output]

    for region in _own(problem):
        read = [n for n in region.again if any(user in region.backward for user in n.users)]
        bytes_ = [bytes_of(n.meta["val"]) * fraction(problem, n, chosen(n)) for n in read]
        again = [where[n] for n in region.again if n in where]
        seconds = sum(float(problem.choices(v).seconds[evaluation.choice[v]]) for v in again)
        _, count = pieces_of(_rows(problem, region.node.meta["val"], chosen(region.node)))
        found.append(TiledRegion(region.node.name, region.module, sum(bytes_), seconds, count))
    return tuple(found)


def fraction(problem: Problem, node: fx.Node, layout: Layout) -> float:
    """Return the part of a tensor on the device that holds most of it."""
    shape = node.meta["val"].shape
    return largest_local_numel(shape, layout, problem.mesh) / max(1, math.prod(shape))


def reads_alike(problem: Problem, evaluation: Evaluation) -> bool:
    """Return whether all ops of each region read its source in one layout, and the gradient that its backward starts
    from."""
    where = {v.node: v.index for v in problem.vertices if v.kind == "op"}

    def layouts(region: RowRegion, tensor: fx.Node) -> Iterator[Layout]:
        for node in region.ops:
            strategy = problem.choices(where[node]).strategies[evaluation.choice[where[node]]]
            for argument, layout in zip(tensor_arguments(node), strategy.inputs):
                if argument is tensor:
                    yield layout

    return all(
        len(set(layouts(region, tensor))) == 1
        for region in _own(problem)
        for tensor in (region.source, region.gradient)
    )
