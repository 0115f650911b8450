"""Write down when everything happens as a chosen plan is played (autopar/planner/objective/player.py).

A collective that is pushed aside by another goes on later: it is as many events as it has stretches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...cost.exchange import exchange_axes, exchange_bytes
from ...cost.redistribute import MoveStep
from ...ir.graph import op_base_name
from ..problem.multipliers import PHASES
from ..problem.problem import Problem
from .beside import Beside
from .evaluate import Evaluation
from .host_travels import HostTravel
from .module_table import module_of
from .player import Player
from .pricer import Pricer
from .script import COMPUTES, Piece, StreamOf, scripts_of
from .step_order import Execution, StepOrder

COMPUTE, HOST_LINK = "compute", "host"
TO_HOST, FROM_HOST = "to host", "from host"
NOTHING_GAINED = 2.0  # a slowdown: both together take as long as one after the other


@dataclass(frozen=True)
class Event:
    """One op on the compute stream, or a stretch of one move of a tensor. `streams`: "compute", the axes of a
    collective, or "host" for copies to the host and back. `name`: of the op's node, or of the node whose tensor moves;
    `vertex`: its number in the problem, `output` which of its tensors. `kind`: the op, the move, or a cast of what is
    moved. `bytes_`: what a device sends."""

    streams: tuple[str, ...]
    name: str
    kind: str
    module: str
    phase: str
    start_seconds: float
    duration_seconds: float
    bytes_: float
    vertex: int
    output: int = 0
    step: MoveStep | None = None
    recomputed: bool = False

    @property
    def end_seconds(self) -> float:
        """Return when the event ends, in seconds of the step."""
        return self.start_seconds + self.duration_seconds


@dataclass(frozen=True)
class Timeline:
    """Events in the order in which they were issued; those that take no time are left out. `busy_seconds` by stream."""

    events: tuple[Event, ...]
    seconds: float
    busy_seconds: dict[str, float]

    @property
    def exposed_seconds(self) -> float:
        """Return the seconds that the compute stream waits for communication."""
        return max(0.0, self.seconds - self.busy_seconds[COMPUTE])


def simulate(problem: Problem, e: Evaluation, pricer: Pricer, slowdown: float | None = None) -> Timeline:
    """Play an evaluated choice through: the pass that also carries what one pass of a step alone moves. `slowdown`: how
    much longer compute takes beside a collective, 1 or more, as the plan was made for unless given; from 2 on, where
    nothing is gained, compute waits for every collective. Raise ValueError for less than 1."""
    if slowdown is not None and slowdown < 1.0:
        raise ValueError(f"slowdown is {slowdown}, and beside a collective nothing computes faster: 1 or more is meant")
    if slowdown is not None:
        e = replace(e, overlap=max(0.0, NOTHING_GAINED - slowdown))
    events, now = [], 0.0
    for phase, script in zip(PHASES, scripts_of(problem, e, StreamOf(pricer))):
        writer = _Writer(problem, e, pricer, phase, now)
        now += Player(script, e.overlap, writer.tell).play()
        events += writer.events
    busy = dict.fromkeys((COMPUTE, *problem.mesh.names, *((HOST_LINK,) if e.on_host else ())), 0.0)
    for event in events:
        for stream in event.streams:
            busy[stream] += event.duration_seconds
    return Timeline(tuple(sorted(events, key=lambda event: event.start_seconds)), now, busy)


def ends_of(order: StepOrder, timeline: Timeline) -> list[float]:
    """Return when each run of a step ends in a timeline of it; one that takes no time ends with the one before it."""
    taken = {(e.vertex, e.recomputed): e.end_seconds for e in timeline.events if e.streams == (COMPUTE,) and not e.step}
    result, now = [], 0.0
    for run in order.runs:
        now = taken.get((run.vertex, run.recomputed), now)
        result.append(now)
    return result


class _Writer:
    """Writes down what a player does in a phase that begins at `begin`."""

    def __init__(self, problem: Problem, e: Evaluation, pricer: Pricer, phase: str, begin: float):
        self.problem, self.class_of, self.phase, self.begin = problem, pricer.prices.class_of, phase, begin
        self.choice = e.choice
        self.events: list[Event] = []
        self.last: dict[int, int] = {}  # by piece its last event

    def tell(self, piece: Piece, start: float, end: float) -> None:
        """Write a stretch of a piece down, together with the one before if it goes on from there."""
        start, end = start + self.begin, end + self.begin
        number = self.last.get(id(piece))
        if number is not None and start - self.events[number].end_seconds <= 1e-12 + 1e-9 * start:
            before = self.events[number]
            self.events[number] = replace(before, duration_seconds=end - before.start_seconds)
            return
        self.last[id(piece)] = len(self.events)
        self.events.append(self._event(piece, start, end - start))

    def _event(self, piece: Piece, start: float, seconds: float) -> Event:
        if isinstance(piece.source, Execution):
            run, v = piece.source, self.problem.vertices[piece.source.vertex]
            return Event((COMPUTE,), v.name, op_base_name(v.node), module_of(v), self.phase, start, seconds, 0.0,
                         run.vertex, 0, None, run.recomputed)  # fmt: skip
        if isinstance(piece.source, HostTravel):
            value = piece.source.value
            v, way = self.problem.vertices[value.key[0]], TO_HOST if self.phase == PHASES[0] else FROM_HOST
            return Event(
                (HOST_LINK,), v.name, way, module_of(v), self.phase, start, seconds, value.bytes_, *value.key[:2]
            )
        if isinstance(piece.source, Beside):
            v = self.problem.vertices[piece.source.vertex]
            strategy = self.problem.choices(v.index).strategies[self.choice[v.index]]
            axes = exchange_axes(v.node, strategy, self.problem.mesh)
            sent = exchange_bytes(v.node, strategy, self.problem.mesh)
            return Event(axes, v.name, "all_to_all", module_of(v), self.phase, start, seconds, sent, v.index)
        travel, step = piece.source
        t, v = travel.transfer, self.problem.vertices[travel.transfer.producer]
        if piece.stream == COMPUTES:
            kind = "slice" if step.move.kind == "slice" else "cast"
            streams: tuple[str, ...] = (COMPUTE,)
        else:
            kind = step.move.kind
            streams = tuple(a for a in step.move.axes if self.class_of[a] == piece.stream - 1)
        return Event(
            streams,
            v.name,
            kind,
            module_of(v),
            self.phase,
            start,
            seconds,
            step.wire_fraction * t.bytes_,
            t.producer,
            t.output,
            step,
            travel.recomputed,
        )
