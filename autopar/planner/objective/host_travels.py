"""Say when values that wait on the host are on their way in a step, as passes/distribute/save_on_host.py lets them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...cost.compute import FREE
from ...ir.block_order import one_ahead, one_behind
from ..problem.problem import Problem
from .evaluate import Evaluation
from .host_values import HostValue
from .step_order import StepOrder


@dataclass(frozen=True)
class HostTravel:
    """One value, by positions in `StepOrder.runs`: run `made` makes it and may be followed by its copy to the host, for
    which the forward waits behind run `end`; its copy back starts before run `start`, `first` and `last` read it.
    `sent` and `back`: runs of blocks that have as many copies in the whole graph as the value, which is `made` by
    or read `first` in what may be their neighbours."""

    value: HostValue
    made: int
    end: int
    start: int
    first: int
    last: int
    sent: int
    back: int


def host_travels(problem: Problem, e: Evaluation, order: StepOrder) -> Iterator[HostTravel]:
    """Iterate over the travels of a plan's values, in the order in which the backward reads them."""
    if not e.on_host:
        return
    border = next((i for i, run in enumerate(order.runs) if run.phase == "backward"), len(order.runs))
    end, start = one_behind(order.blocks[:border]), one_ahead(order.blocks[border:])
    made = {run.vertex: i for i, run in enumerate(order.runs) if run.phase == "forward"}
    reads, copies = _reads(problem, order, border), problem.copies(e.first)
    found = []
    for value in e.on_host:
        v, output, _ = value.key
        readers = reads[v, output]
        first, back, sent = min(readers), min(readers), made[v]
        if copies[order.runs[sent].vertex] != value.copies:
            sent = next((i for i in range(border) if order.blocks[i] == value.reader), sent)
        if copies[order.runs[back].vertex] != value.copies:
            own = value.reader or order.blocks[made[v]]
            back = next((i for i in range(border, len(order.runs)) if order.blocks[i] == own), back)
        started = border + start[first - border]
        found.append(HostTravel(value, made[v], end[made[v]] - 1, started, first, max(readers), sent, back))
    yield from sorted(found, key=lambda travel: travel.first)


def _reads(problem: Problem, order: StepOrder, border: int) -> dict[tuple[int, int], list[int]]:
    """Return the runs of the backward that read a tensor of the forward, or a view of it."""
    reads: dict[tuple[int, int], list[int]] = {}
    views: dict[tuple[int, int], tuple[int, int]] = {}
    for v in problem.vertices:
        if v.kind == "op" and v.phase == "forward" and v.node.target in FREE and v.inputs:
            base = views.get(v.inputs[0], v.inputs[0])
            views |= {(v.index, output): base for output in range(len(v.values))}
    for i, run in enumerate(order.runs[border:], border):
        for tensor in problem.vertices[run.vertex].inputs:
            for read in {tensor, views.get(tensor, tensor)}:
                reads.setdefault(read, []).append(i)
    for travel in order.travels:
        t = travel.transfer
        if travel.phase == "backward" and border <= travel.first < len(order.runs):
            reads.setdefault((t.producer, t.output), []).append(travel.first)
    return reads
