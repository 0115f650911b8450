"""Compute the cost of a plan anew on the unfolded graph: every tensor, every redistribution, every byte that stays.

The solver is checked against it: the objective of a solution must equal the cost found here. A tensor is redistributed
once for all consumers of a phase that want the same layout, and served in the cheapest of its modes
(autopar/planner/objective/modes.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ...cost.redistribute import MoveStep, Redistribution
from ...ir.layout import Layout
from ...ir.mesh import Mesh
from ..problem.multipliers import PHASES, Prices, spans_of
from ..problem.problem import Problem
from ..problem.vertices import STATE, Use
from .beside import Beside
from .host_values import HostValue
from .loads import PhaseLoads
from .modes import BACKWARD, FORWARD, MAKE, ONCE, Copy, cheapest, modes_of, waits
from .pricer import Pricer


@dataclass(frozen=True)
class Looped:
    """A transfer goes round beside products (see loops.py), which takes it so many seconds less than by itself."""

    beside_seconds: float


@dataclass(frozen=True)
class Transfer:
    """A redistribution that the plan makes: of which tensor, in which phase, from and to which layout, and the price of
    one of its `copies`, on average over the passes of a step, in `times` of which it is made. What is hidden may run
    beside compute: parameters gathered ahead, gradients reduced behind. One that is `looped` has the price of what its
    loop takes more than the products in it."""

    producer: int
    output: int
    phase: str
    source: Layout
    target: Layout
    seconds: float
    redistribution: Redistribution
    bytes_: int  # global
    consumers: tuple[int, ...]
    copies: int
    is_hidden: bool
    times: int = 1
    split: tuple[float, ...] = (1.0,)  # shares of the seconds by stream
    looped: Looped | None = None

    @property
    def alone_seconds(self) -> float:
        """Return the seconds of one copy with nothing beside it."""
        return self.seconds + (self.looped.beside_seconds if self.looped else 0.0)

    def called_as(self, step: MoveStep, mesh: Mesh) -> tuple[str, int]:
        """Return the kind of the collectives of a step in one pass, and their number."""
        if not self.looped:
            return step.move.kind, 1
        return f"{step.move.kind}_loop", math.prod(map(mesh.size, step.move.axes)) - 1

    def priced(self, prices: Prices, micro_batches: int) -> float:
        """Return the seconds of one copy at some prices, in a step of so many passes."""
        return prices.weighted(self.seconds, self.split, self.phase, self.is_hidden, self.times < micro_batches)

    @property
    def step_seconds(self) -> list[tuple[MoveStep, float]]:
        """Return the steps with what the plan charges for each: a tensor in a bucket pays part of the latency."""
        r = self.redistribution
        charged = self.alone_seconds / max(r.latency_seconds + r.seconds_per_byte * self.bytes_, 1e-30)
        return [(s, charged * (s.latency_seconds + s.seconds_per_byte * self.bytes_)) for s in r.steps]


@dataclass
class Evaluation:
    """Cost of one complete choice, of a pass if a step has several. Bytes are per device, for the device that holds
    most."""

    compute: dict[str, float]  # seconds by phase, with exchanges of rows, but for what is `beside`
    transfers: list[Transfer]
    resident_bytes: float
    gradient_bytes: float
    # saved for the backward: (vertex, output, layout) -> bytes of all copies
    saved: dict[tuple[int, int, Layout], float]
    overlap: float = 0.0  # share of a second that is gained when hidden communication runs beside compute
    micro_batches: int = 1  # of a step
    streams: int = 1  # that compute, and classes of links
    retained: set[tuple[int, int, Layout]] = field(default_factory=set)  # copies for the backward
    choice: dict[int, int] = field(default_factory=dict)  # strategy of every vertex
    first: int = 0  # how the blocks that a compact graph leaves out decide, see Problem.copies
    # block -> level -> (step, copies that take it), see checkpoint_blocks.py
    recomputed: dict[str, dict] = field(default_factory=dict)
    recompute_seconds: float = 0.0  # of compute; what has to be moved again for it is in `recompute_transfers`
    parameter_seconds: float = 0.0  # of the optimizer, and of copies of parameters on the host
    whole_gradient_bytes: float = 0.0  # what gradients that wait for one reduction take beyond their shards
    reduces_once: bool = False  # gradients of several passes wait for one reduction
    gathers_once: bool = False  # copies of parameters that are kept serve all passes of a step
    beside: tuple[Beside, ...] = ()  # exchanges of rows that products, or another micro-batch, run beside
    turns: frozenset[int] = frozenset()  # exchanges that end turns of two micro-batches, see side_by_side.py
    on_host: tuple[HostValue, ...] = ()  # values that wait there, of which no bytes are in `saved`
    transient_bytes: float = 0.0  # one recomputed block, alive again during its backward
    # what else is alive when memory peaks, less what of the rest is not (see memory_timeline.py)
    uncharged_bytes: float = 0.0
    peaks_early: bool = True  # whether memory peaks before most gradients are there

    @property
    def compute_seconds(self) -> float:
        """Return the seconds of compute in both phases, without recomputation."""
        return sum(self.compute.values())

    @cached_property
    def recompute_transfers(self) -> list[Transfer]:
        """Return what recomputed blocks move in the backward besides `transfers`."""
        taken = [pair for levels in self.recomputed.values() for pair in levels.values()]
        return [replace(t, phase="backward", copies=count) for step, count in taken for t in step.moved]

    @property
    def every_transfer(self) -> list[Transfer]:
        """Return the transfers of the plan together with those of recomputed blocks."""
        return self.transfers + self.recompute_transfers

    @property
    def communication_seconds(self) -> float:
        """Return the seconds of every transfer in all its copies, whether hidden or not."""
        return sum(t.alone_seconds * t.copies for t in self.every_transfer) + self.travelling_seconds

    @property
    def travelling_seconds(self) -> float:
        """Return the seconds of exchanges of rows that products run beside."""
        return sum(one.seconds * one.copies for one in self.beside)

    @property
    def beside_seconds(self) -> float:
        """Return the seconds of communication that loops hide beside products."""
        return max(0.0, sum(t.looped.beside_seconds * t.copies for t in self.transfers if t.looped))

    @property
    def host_bytes(self) -> float:
        """Return the bytes that the host holds of a device's values, at most."""
        return sum(value.bytes_ * value.count for value in self.on_host)

    @property
    def host_seconds(self) -> float:
        """Return the seconds of the link to the host for values that wait there, both ways."""
        return 2 * sum(value.seconds * value.count for value in self.on_host)

    @property
    def apart_seconds(self) -> float:
        """Return the seconds of all parts one after the other."""
        moved = self.communication_seconds + self.host_seconds
        return self.compute_seconds + self.recompute_seconds + moved + self.parameter_seconds

    @cached_property
    def seconds(self) -> float:
        """Return the seconds that the busiest stream needs in every phase, and those of the optimizer: no play of the
        plan takes less."""
        spans = spans_of(self.micro_batches)
        return self.parameter_seconds + sum(
            share * self.loads[phase].of(is_once).seconds(self.overlap) for phase, share, is_once in spans
        )

    @cached_property
    def loads(self) -> dict[str, PhaseLoads]:
        """Return how busy each phase keeps the streams."""
        found = {phase: PhaseLoads.empty(self.streams) for phase in PHASES}
        for phase, compute in self.compute.items():
            found[phase].every.waited[0] += compute
        found["backward"].every.waited[0] += self.recompute_seconds
        for t in self.every_transfer:
            load = found[t.phase].once if t.times < self.micro_batches else found[t.phase].every
            seconds = t.seconds * t.copies * (self.micro_batches if t.times < self.micro_batches else 1)
            load.add(t.split, seconds, t.is_hidden)
        for one in self.beside:
            found[one.phase].every.hidden[one.stream] += one.seconds * one.copies
        for phase in PHASES if self.on_host else ():  # there in the forward, back in the backward
            found[phase].every = replace(found[phase].every, host=self.host_seconds / 2)
        return found

    def slopes(self) -> np.ndarray:
        """Return how fast the priced seconds grow with the weight of each class of links, by span."""
        found = []
        for phase, share, is_once in spans_of(self.micro_batches):
            rows = self.loads[phase].of(is_once).rows(self.overlap)
            found.append(share * (rows[1:] - rows[0]))
        return np.concatenate(found)

    def priced(self, prices: Prices) -> float:
        """Return the cost that a search at these prices minimizes, without recomputation."""
        compute = sum(seconds * prices.compute(phase) for phase, seconds in self.compute.items())
        moved = sum(t.copies * t.priced(prices, self.micro_batches) for t in self.transfers)
        gradients = prices.gradients * (self.gradient_bytes + self.whole_gradient_bytes)
        held = self.resident_bytes + gradients + (self.saved_bytes if prices.saved else 0.0)
        return compute + moved + self.parameter_seconds + prices.byte_seconds * held

    @property
    def saved_bytes(self) -> float:
        """Return the bytes of all that is saved for the backward."""
        return sum(self.saved.values())

    @property
    def bytes_(self) -> float:
        """Return the bytes at the peak of the step."""
        return self.charged_bytes + self.uncharged_bytes

    @property
    def charged_bytes(self) -> float:
        """Return the bytes that have a price in the search, whether they are all alive at one time or not."""
        return (
            self.resident_bytes
            + self.gradient_bytes
            + self.saved_bytes
            + self.whole_gradient_bytes
            + self.transient_bytes
        )


def held(transfers: list[Transfer], keys: Collection[tuple[int, int, Layout]]) -> list[Transfer]:
    """Return the transfers with these copies kept through a step: those of parameters, which alone of the forward's are
    hidden, are made once for all its passes."""
    return [
        replace(t, seconds=t.seconds / t.times, times=1)
        if t.phase == "forward" and t.is_hidden and (t.producer, t.output, t.target) in keys
        else t
        for t in transfers
    ]


def evaluate(
    problem: Problem,
    choice: dict[int, int],
    pricer: Pricer,
    prices: Prices = Prices(),
    keep_parameters: bool | None = None,
    first: int | None = None,
    known: Callable[[Sequence[Use]], Served | None] = lambda uses: None,
) -> Evaluation:
    """Return the cost of choosing strategy `choice[vertex]` for every vertex of the unfolded graph. Of the blocks that
    a compact graph leaves out `first` decide as block 2 does, or half of them if that is not said.

    `prices` decide what is kept for the backward; `keep_parameters` overrides them for gathered parameters (False
    gathers again, ZeRO-3; True keeps, ZeRO-1 and 2); `known`: gives how the tensor of some uses is served where that is
    decided already."""
    first = problem.half if first is None else first
    copies = problem.copies(first)
    result = Evaluation({"forward": 0.0, "backward": 0.0}, [], 0.0, 0.0, {}, prices.overlap, pricer.micro_batches,
                        pricer.prices.streams, choice=choice, first=first)  # fmt: skip
    result.reduces_once, result.gathers_once = pricer.reduces_once, pricer.gathers_once
    for v, times in zip(problem.vertices, copies):
        options, k = problem.choices(v.index), choice[v.index]
        phase = "backward" if v.phase == "backward" else "forward"
        seconds = float(options.seconds[k]) * times
        if v.kind == "op":
            result.compute[phase] += seconds
            if v.index in problem.made_again:
                result.compute["backward"] += seconds
        else:
            result.parameter_seconds += seconds
        result.resident_bytes += float(options.resident_bytes[k]) * times
        result.gradient_bytes += float(options.gradient_bytes[k]) * times
    for (producer, output), uses in problem.uses_of.items():
        served = known(uses) or serve(problem, choice, pricer, prices, keep_parameters, uses, copies[producer])
        result.transfers.extend(served.transfers)
        result.retained.update(served.retained)
        result.saved.update(served.saved)
        if pricer.reduces_once and is_of_one(problem, uses):  # others have no price, see memory_timeline.py
            made = problem.choices(producer).strategies[choice[producer]].outputs[output]
            whole = unreduced_bytes(problem, choice, pricer, uses, made)
            result.whole_gradient_bytes += whole * copies[uses[0].consumer]
    return result


def unreduced_bytes(
    problem: Problem, choice: dict[int, int], pricer: Pricer, uses: Sequence[Use], made: Layout
) -> float:
    """Return the bytes of one gradient as it is made beyond those of its shard; 0 for other tensors."""
    consumer = problem.vertices[uses[0].consumer]
    if consumer.kind != "parameter" or not any(u.slot == STATE and u.phase == "backward" for u in uses):
        return 0.0
    shard = problem.choices(consumer.index).strategies[choice[consumer.index]].outputs[0]
    master = consumer.node.meta["val"]  # a gradient has the type of its parameter, not of the copy that computes
    return max(0.0, pricer.bytes_of(master, made) - pricer.bytes_of(master, shard))


def is_of_one(problem: Problem, uses: Sequence[Use]) -> bool:
    """Return whether a tensor has one use alone, or several of one class, which decide alike."""
    return len({(problem.vertices[u.consumer].cls, u.slot, u.phase) for u in uses}) == 1


@dataclass(frozen=True)
class Served:
    """The transfers of one tensor, the copies of it that are kept, and the bytes of it that wait for the backward."""

    transfers: tuple[Transfer, ...]
    retained: tuple[tuple[int, int, Layout], ...]
    saved: tuple[tuple[tuple[int, int, Layout], float], ...]


def serve(
    problem: Problem,
    choice: dict[int, int],
    pricer: Pricer,
    prices: Prices,
    keep_parameters: bool | None,
    uses: Sequence[Use],
    copies: int,
) -> Served:
    """Serve one tensor to all its uses in its cheapest mode."""
    producer, output = uses[0].producer, uses[0].output
    vertex = problem.vertices[producer]
    source = problem.choices(producer).strategies[choice[producer]].outputs[output]
    readers: dict[str, dict[Layout, list[int]]] = {"forward": {}, "backward": {}}
    reads_base = False
    for use in uses:
        strategy = problem.choices(use.consumer).strategies[choice[use.consumer]]
        target = strategy.outputs[0] if use.slot == STATE else strategy.inputs[use.slot]
        if target != source:
            readers[use.phase].setdefault(target, []).append(use.consumer)
        reads_base |= target == source and use.phase == "backward"

    def bytes_in(layout: Layout) -> float:
        return pricer.saved_bytes(producer, output, layout)

    def saved(layout: Layout) -> tuple[tuple[int, int, Layout], float]:
        return (producer, output, layout), bytes_in(layout) * copies

    saves, has_base = waits(vertex) and (producer, output) not in problem.never_made, vertex.kind != "parameter"
    targets = dict.fromkeys((*readers["forward"], *readers["backward"]))
    if not targets:
        return Served((), (), (saved(source),) if saves and has_base and reads_base else ())
    slots = [u.slot for u in uses]
    bytes_ = pricer.moved_bytes(producer, output, slots, source)
    is_hidden, times = pricer.is_bucketed(producer, slots), pricer.times(producer, slots, source)
    byte_seconds = prices.byte_seconds if prices.saved and saves else 0.0
    bucket = pricer.bucket_of(producer, slots, bytes_)
    moved = {target: pricer.moved(producer, output, source, target, bytes_, bucket) for target in targets}

    def priced_seconds(target: Layout, phase: str, made: int) -> float:
        is_once = made < pricer.micro_batches
        return prices.weighted(*moved[target], phase, is_hidden, is_once) * made / pricer.micro_batches

    priced = {
        target: Copy(
            FORWARD * (target in readers["forward"]) | BACKWARD * (target in readers["backward"]),
            priced_seconds(target, "forward", times),
            priced_seconds(target, "backward", times),
            priced_seconds(target, "forward", 1),
            byte_seconds and byte_seconds * bytes_in(target),
        )
        for target in targets
    }
    base = byte_seconds * bytes_in(source) if has_base else 0.0
    modes = modes_of(vertex, pricer.gathers_once, keep_parameters)
    ways = cheapest(modes, priced, base, reads_base)

    def transfer(target: Layout, phase: str) -> Transfer:
        made = 1 if ways[target] == ONCE else times
        return Transfer(
            producer,
            output,
            phase,
            source,
            target,
            moved[target][0] * made / pricer.micro_batches,
            pricer.redistribute(source, target),
            bytes_,
            tuple(readers[phase][target]),
            copies,
            is_hidden,
            made,
            moved[target][1],
        )

    retained = [target for target in targets if ways[target] != MAKE]
    redone = [target for target in readers["backward"] if ways[target] == MAKE]
    waiting = [*retained, *([source] if has_base and (reads_base or redone) else [])]
    return Served(
        (*(transfer(t, "forward") for t in readers["forward"]), *(transfer(t, "backward") for t in redone)),
        tuple((producer, output, t) for t in retained),
        tuple(map(saved, waiting)) if saves else (),
    )
