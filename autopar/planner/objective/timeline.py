"""When everything happens: a chosen plan played through on one compute stream and one stream for the links of each mesh
axis.

The planner's step is a serial sum. Here a collective occupies the streams of its axes while the ops that do not wait
for it go on: parameters are gathered ahead of their block, gradients are reduced behind the backward
(autopar/planner/objective/step_order.py says from when on). Each stream works in the order of the step. Without a
slowdown, the result lies between the busiest stream's time and the serial sum.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass

from ...cost.redistribute import MoveStep
from ...ir.graph import op_base_name
from ..problem.problem import Problem
from .evaluate import Evaluation
from .module_table import module_of
from .step_order import Travel, step_order

COMPUTE = "compute"
NOTHING_GAINED = 2.0  # a slowdown: both together take as long as one after the other


@dataclass(frozen=True)
class Event:
    """One op on the compute stream, or one move of a tensor. `streams`: "compute", or the axes of a collective. `name`:
    of the op's node, or of the node whose tensor moves; `vertex`: its number in the problem, `output` which of its
    tensors. `kind`: the op, or the move. `bytes_`: what a device sends."""

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


def simulate(problem: Problem, evaluation: Evaluation, slowdown: float = 1.0) -> Timeline:
    """Play an evaluated choice through. `slowdown` says how much longer compute takes beside a collective, 1 or more;
    from 2 on, where nothing is gained, compute waits for every collective. Raise ValueError for less than 1."""
    if slowdown < 1.0:
        raise ValueError(f"slowdown is {slowdown}, and beside a collective nothing computes faster: 1 or more is meant")
    return _Player(problem, evaluation, slowdown).play()


class _Player:
    def __init__(self, problem: Problem, evaluation: Evaluation, slowdown: float):
        self.problem, self.choice, self.slowdown = problem, evaluation.choice, slowdown
        self.order = step_order(problem, evaluation)
        self.events: list[Event] = []
        self.free: dict[str, float] = dict.fromkeys((COMPUTE, *problem.mesh.names), 0.0)
        self.made: dict[int, float] = {}  # end of an op, by vertex
        self.arrived: dict[tuple, float] = {}  # end of a transfer, by tensor, layout and phase
        self.traffic = _Busy()

    def play(self) -> Timeline:
        """Play all travels and runs through in the order of the step, and return the timeline."""
        starting, wanted = defaultdict(list), defaultdict(list)
        for travel in self.order.travels:
            starting[travel.start].append(travel)
        for position in range(len(self.order.runs) + 1):
            for travel in starting.pop(position, ()):
                early, late = _split(travel)
                self._travel(travel, early)
                if late:
                    wanted[travel.first].append((travel, late))
            for travel, late in wanted.pop(position, ()):
                self._travel(travel, late)
            if position < len(self.order.runs):
                self._run(position)
        seconds = max((e.end_seconds for e in self.events), default=0.0)
        busy = dict.fromkeys(self.free, 0.0)
        for event in self.events:
            for stream in event.streams:
                busy[stream] += event.duration_seconds
        return Timeline(tuple(self.events), seconds, busy)

    def _run(self, position: int) -> None:
        run = self.order.runs[position]
        v, options = self.problem.vertices[run.vertex], self.problem.choices(run.vertex)
        strategy = options.strategies[self.choice[run.vertex]]
        ready = self.free[COMPUTE]
        for (producer, output), wanted in zip(v.inputs, strategy.inputs):
            ready = max(ready, self._ready(producer, output, wanted, run.phase))
        seconds = float(options.seconds[self.choice[run.vertex]])
        self.made[run.vertex] = self._occupy(
            (COMPUTE,),
            v.name,
            op_base_name(v.node),
            module_of(v),
            run.phase,
            ready,
            seconds,
            0.0,
            run.vertex,
            0,
            None,
            run.recomputed,
        )

    def _ready(self, producer: int, output: int, wanted, phase: str) -> float:
        """Return when a tensor is there in a layout: transferred, kept from the forward, or as it was made."""
        for key in ((producer, output, wanted, phase), (producer, output, wanted, "forward")):
            if key in self.arrived:
                return self.arrived[key]
        return self.made.get(producer, 0.0)

    def _travel(self, travel: Travel, steps: list[tuple[MoveStep, float]]) -> None:
        t = travel.transfer
        v, key = self.problem.vertices[t.producer], (t.producer, t.output, t.target, travel.phase)
        ready = self.arrived.get(key, self.made.get(t.producer, 0.0))
        if travel.start:  # a gather ahead of its block waits for the block before it to begin
            ready = max(ready, self.made[self.order.runs[travel.start - 1].vertex])
        for step, seconds in steps:
            streams = (COMPUTE,) if step.move.kind == "slice" else step.move.axes
            waited = streams if self.slowdown < NOTHING_GAINED else (COMPUTE, *streams)
            ready = self._occupy(
                streams, v.name, step.move.kind, module_of(v), travel.phase,
                max(ready, *(self.free[s] for s in waited)), seconds, step.wire_fraction * t.bytes_, t.producer,
                t.output, step, travel.recomputed,
            )  # fmt: skip
            if self.slowdown >= NOTHING_GAINED:
                self.free[COMPUTE] = max(self.free[COMPUTE], ready)
        self.arrived[key] = ready

    def _occupy(self, streams, name, kind, module, phase, start, seconds, *rest) -> float:
        """Add an event and return its end."""
        if not seconds:
            return start
        if streams == (COMPUTE,):
            seconds = self.traffic.stretched(start, seconds, self.slowdown)
        else:
            self.traffic.add(start, start + seconds)
        self.events.append(Event(streams, name, kind, module, phase, start, seconds, *rest))
        for stream in streams:
            self.free[stream] = start + seconds
        return start + seconds


def _split(travel: Travel) -> tuple[list[tuple[MoveStep, float]], list[tuple[MoveStep, float]]]:
    """Split a travel's steps into those that are made as soon as they can be, and those from the first local copy after
    a collective on: that one is made where the result is wanted, so that the compute stream does not wait for the
    collective earlier than it must."""
    steps, seen = travel.transfer.step_seconds, False
    for i, (step, _) in enumerate(steps):
        if step.move.kind == "slice" and seen:
            return steps[:i], steps[i:]
        seen |= step.move.kind != "slice"
    return steps, []


class _Busy:
    """Times at which a collective travels, as disjoint intervals in order."""

    def __init__(self):
        self.starts: list[float] = []
        self.ends: list[float] = []

    def add(self, start: float, end: float) -> None:
        """Add an interval, merged with those that it touches."""
        i = bisect_left(self.ends, start)
        j = bisect_right(self.starts, end)
        if i < j:
            start, end = min(start, self.starts[i]), max(end, self.ends[j - 1])
        self.starts[i:j], self.ends[i:j] = [start], [end]

    def stretched(self, start: float, seconds: float, slowdown: float) -> float:
        """Return how long `seconds` of compute take from `start` on if they go `slowdown` times slower beside a
        collective."""
        if slowdown == 1.0:
            return seconds
        now, left = start, seconds
        for i in range(bisect_right(self.ends, start), len(self.ends)):
            alone = self.starts[i] - now
            if alone >= left:
                break
            if alone > 0:
                now, left = self.starts[i], left - alone
            overlapped = (self.ends[i] - now) / slowdown
            if overlapped >= left:
                return now + left * slowdown - start
            now, left = self.ends[i], left - overlapped
        return now + left - start
