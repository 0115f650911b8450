"""Count the bytes that a device holds at every moment of a step: what stays, what waits for the backward, and what
passes by.

Parameters and optimizer state stay all through training; a gradient lives from the op that makes it to the end. A
tensor saved for the backward lives from the op that makes it to its last reader, or, if it waits on the host, until it
is there and from where it is brought back. Besides these live the values between two ops, gathered parameters on their
way through a block, buckets of collectives, gradients before they are reduced, and what an op of a GPU allocates while
it runs. A view lives in the memory of what it looks at, also where the view is saved instead. What the device's
context, the communication library and the allocator keep for themselves is there all the time.

Where the backwards of a step wait for its tail (passes/pipeline/tail.py), a pass begins and ends with what all other
micro-batches have saved, and what the tail holds is counted all through.

In a compact graph the copies of a block that are left out hold what the block saves until its backward ends, and its
gradients from then on: what they hold in between is never more than at one of the two ends.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...cost.memory import NEARLY_ALL
from ...cost.redistribute import MoveStep
from ...ir.layout import Layout
from ..problem.problem import Problem
from ..problem.vertices import Vertex
from ..problem.weight_codes import is_gathered_ahead
from .bucket_bytes import BUCKETS, GATHERED, bucket_bytes
from .chosen_tensors import PARAMETERS, chosen_tensors
from .evaluate import Evaluation
from .host_travels import host_travels
from .pricer import Pricer
from .side_by_side import with_the_other
from .step_order import StepOrder, Travel, one_op_a_region, step_order

RESERVE, KEPT = "allocator reserve", "kept keys"
GRADIENTS, SAVED, RETAINED, RECOMPUTED, TRANSIENT, WORKSPACE = (
    "gradients", "activations", "gathered parameters kept", "recomputed block", "values between ops", "op workspace",
)  # fmt: skip
OF_A_MICRO_BATCH = (SAVED, RECOMPUTED, TRANSIENT, WORKSPACE, BUCKETS, GATHERED)  # others share them


@dataclass(frozen=True)
class LiveBytes:
    """Bytes of a device by kind while each run of `order` is at work; kinds that never hold any are left out."""

    order: StepOrder
    kinds: dict[str, np.ndarray]

    @cached_property
    def total(self) -> np.ndarray:
        """Return the bytes of all kinds together at each run."""
        return sum(self.kinds.values(), np.zeros(len(self.order.runs)))

    @property
    def peak_bytes(self) -> float:
        """Return the most bytes of a device at any node."""
        return float(self.total.max(initial=0.0))

    @property
    def most(self) -> dict[str, float]:
        """Return, by kind, the most that is ever alive."""
        return {kind: float(b.max()) for kind, b in self.kinds.items()}

    @property
    def at_peak(self) -> dict[str, float]:
        """Return, by kind, what is alive at the peak."""
        return {kind: float(b[self.peak_at]) for kind, b in self.kinds.items() if b[self.peak_at] > 0.5}

    @property
    def peaks_early(self) -> bool:
        """Return whether memory peaks while most gradients are still to come, as where the forward ends."""
        return self.at_peak.get(GRADIENTS, 0.0) <= 0.5 * self.most.get(GRADIENTS, 0.0)

    @property
    def peak_at(self) -> int:
        """Return the position of the run at the peak, the first of several."""
        return int(self.total.argmax()) if len(self.total) else 0


def live_bytes(problem: Problem, evaluation: Evaluation, pricer: Pricer, order: StepOrder | None = None) -> LiveBytes:
    """Return the memory of a device over the step that an evaluation describes. `order`: of the step, if known."""
    order = order or step_order(problem, evaluation)
    lives = _Lives(problem, evaluation, pricer, order)
    count = max(len(order.runs), 1)
    changes: dict[str, list[float]] = defaultdict(lambda: [0.0] * (count + 1))
    for kind, bytes_ in lives.tensors.resident.items():
        changes[kind][0] += bytes_
    changes[RESERVE][0] += problem.reserve_bytes
    changes[TRANSIENT][0] += pricer.tail.bytes_
    for bytes_ in bucket_bytes(problem, pricer, evaluation, order).values():
        steps = np.diff(bytes_, prepend=0.0).tolist()
        changes[BUCKETS][: len(steps)] = map(operator.add, changes[BUCKETS], steps)
    for kind, first, last, bytes_ in lives.spans():
        change = changes[kind]
        change[first if first < count else count - 1] += bytes_
        change[last + 1 if last < count else count] -= bytes_
    held = {kind: np.cumsum(change[:-1])[: len(order.runs)] for kind, change in changes.items()}
    if evaluation.turns:
        own = {kind: bytes_ for kind, bytes_ in held.items() if kind in OF_A_MICRO_BATCH}
        held |= with_the_other(order, evaluation.turns, own, SAVED)
    return LiveBytes(
        order, {kind: np.maximum(bytes_, 0.0) for kind, bytes_ in held.items() if bytes_.max(initial=0.0) > 0.5}
    )


class _Lives:
    """The first and the last run in which each tensor lives."""

    def __init__(self, problem: Problem, evaluation: Evaluation, pricer: Pricer, order: StepOrder):
        self.problem, self.evaluation, self.pricer, self.order = problem, evaluation, pricer, order
        self._ends: dict[int, int] = {}
        self.tensors = chosen_tensors(problem, evaluation, pricer)
        self.strategies, self.copies = self.tensors.strategies, self.tensors.copies
        self.run_of = {(run.vertex, run.recomputed): i for i, run in enumerate(order.runs)}
        self.first, self.last = one_op_a_region(problem, order)
        # the last reader of a tensor by phase: (vertex, output) -> run
        self.reads: dict[str, dict[tuple[int, int], int]] = {"forward": {}, "backward": {}}
        reads_of = self.tensors.reads
        for i, run in enumerate(order.runs):
            reads = self.reads[run.phase]
            for tensor in problem.vertices[run.vertex].inputs if problem.tiled else reads_of[run.vertex]:
                if problem.tiled:
                    self._read(tensor, run.phase, i)
                else:
                    reads[tensor] = i  # runs are in order
        for travel in order.travels:
            self._read((travel.transfer.producer, travel.transfer.output), travel.phase, self._left(travel))

    def _read(self, tensor: tuple[int, int], phase: str, position: int) -> None:
        """Note that a run reads a tensor, and what that lies in."""
        reads, base = self.reads[phase], self.tensors.base(*tensor)
        for key in (tensor,) if tensor == base else (tensor, base):
            at = position
            if self.problem.tiled and key not in self.problem.never_made and at < len(self.last):
                at = self.last[at]
            if at > reads.get(key, -1):
                reads[key] = at

    def spans(self):
        """Iterate over (kind, first run, last run, bytes) of everything that does not stay."""
        e = self.evaluation
        arrival = {
            (t.transfer.producer, t.transfer.output, t.transfer.target): t.held
            for t in self.order.travels
            if t.phase == "forward"
        }
        for (v, o, layout), bytes_ in e.saved.items():
            first = arrival.get((v, o, layout), self.run_of.get((v, False), 0))
            vertex = self.problem.vertices[v]
            kind = RETAINED if vertex.kind == "parameter" else SAVED
            last = max(first, self.reads["backward"].get((v, o), -1))
            if kind == RETAINED and e.gathers_once:
                yield kind, 0, len(self.order.runs), bytes_
                continue
            yield from self._of_all_copies(kind, first, last, vertex, bytes_)
        for value in host_travels(self.problem, e, self.order):  # of the copies of a block one at a time is on its way
            yield SAVED, value.made, value.end, value.value.bytes_
            yield SAVED, value.start, value.last, value.value.bytes_
        yield from self._beside_exchanges()
        yield from self._computing_copies()
        yield from self._gradients()
        yield from self._collective_buffers()
        for v, bytes_ in self.tensors.for_rounds:
            yield SAVED, 0, len(self.order.runs), bytes_ * self.copies[v]
        for v, bytes_ in self.tensors.inputs:
            yield TRANSIENT, 0, len(self.order.runs), bytes_ * self.copies[v]
        for travel in self.order.travels:
            if span := self._copy(travel):
                yield span
        yield from self._values()

    def _values(self):
        """Iterate over the spans of what ops make and of what they allocate while they run."""
        e, never_made = self.evaluation, self.problem.never_made
        saved = {*e.saved, *(value.key for value in e.on_host)}
        covered, made_of, inside_of = self.tensors.as_views(saved), self.tensors.made, self.tensors.inside
        saved_in: dict[tuple[int, int], list[Layout]] = defaultdict(list)
        for v, output, layout in saved:
            saved_in[v, output].append(layout)
        for i, run in enumerate(self.order.runs):
            v, reads = run.vertex, self.reads[run.phase]
            if inside := inside_of[v]:
                yield WORKSPACE, i, i, inside
            for tensor, layout, bytes_ in made_of[v]:
                if not run.recomputed and tensor in saved_in and layout in saved_in[tensor]:
                    continue
                kind, last = RECOMPUTED if run.recomputed else TRANSIENT, reads.get(tensor, -1)
                if not run.recomputed and tensor in covered and covered[tensor] > NEARLY_ALL * bytes_:
                    bytes_ = max(0.0, bytes_ - covered[tensor])
                if tensor in never_made:  # by one call of an op, which begins and ends with it
                    yield kind, i, max(i, min(last, self.last[i])), bytes_
                    continue
                yield kind, self.first[i], max(i, last), bytes_

    def _beside_exchanges(self):
        """Iterate over the spans of what exchanges of rows fill, and of what these need, while ops run beside them."""
        for one in self.evaluation.beside:
            v, wait = one.vertex, self.run_of[one.vertex, False]
            filled = sum(self.tensors.made_bytes(v, o, layout) for o, layout in enumerate(self.strategies[v].outputs))
            inside = self.pricer.inside_bytes(self.problem.vertices[v], self.evaluation.choice[v])
            yield TRANSIENT, wait - len(one.ops), wait - 1, filled + inside

    def _of_all_copies(self, kind: str, first: int, last: int, vertex: Vertex, bytes_: float):
        """Iterate over the spans of something of a block that its backward reads: the copies that a compact graph
        leaves out hold it until that backward ends. What other micro-batches in flight saved is there all the time."""
        copies = self.copies[vertex.index]
        if kind == SAVED and self.pricer.in_flight > 1:
            own = bytes_ / self.pricer.in_flight
            yield kind, 0, len(self.order.runs), bytes_ - own
            bytes_ = own
        yield kind, first, last, bytes_ / copies
        if copies > 1:
            yield kind, first, max(last, self._end_of_backward(vertex.block) - 1), bytes_ * (1 - 1 / copies)

    def _computing_copies(self):
        """Iterate over the spans of parameters in the type that they compute in, from the first to the last time that
        they are read or gathered."""
        casts, asked = self.tensors.casts, defaultdict[int, list[int]](list)
        casts_read = self.tensors.casts_read
        for i, run in enumerate(self.order.runs if casts else ()):
            for parameter in casts_read[run.vertex]:
                asked[parameter].append(i)
        for travel in self.order.travels if casts else ():
            asked[travel.transfer.producer].append(min(travel.held, len(self.order.runs) - 1))
        for v in map(self.problem.vertices.__getitem__, casts):
            if asked[v.index] and not self.strategies[v.index].on_host:
                bytes_ = casts[v.index] * self.copies[v.index]
                yield from self._of_all_copies(PARAMETERS, min(asked[v.index]), max(asked[v.index]), v, bytes_)

    def _gradients(self):
        """Iterate over the spans of gradients as they are left for the optimizer. Those that wait for one reduction are
        whole from the start; others, of ZeRO-1 too, are reduced as soon as they are made."""
        e, count = self.evaluation, len(self.order.runs)
        backward = next((i for i, run in enumerate(self.order.runs) if run.phase == "backward"), 0)
        accumulated = self.pricer.micro_batches > 1  # then those of the passes before are there from the start
        if e.reduces_once:
            yield GRADIENTS, 0, count, e.whole_gradient_bytes + self.tensors.of_several_parameters
        for producer, v, bytes_ in self.tensors.gradients:
            if accumulated:
                yield GRADIENTS, 0, count, bytes_ * self.copies[v.index]
                continue
            made = self.run_of.get((producer, False), backward)
            yield GRADIENTS, self.first[made] if self.first else made, count, bytes_
            if self.copies[v.index] > 1:
                yield GRADIENTS, self._end_of_backward(v.block), count, bytes_ * (self.copies[v.index] - 1)

    def _end_of_backward(self, block: int) -> int:
        """Return the last run in the backward of a block of a compact graph."""
        if block not in self._ends:
            vertices = self.problem.vertices
            runs = [
                i for i, r in enumerate(self.order.runs) if r.phase == "backward" and vertices[r.vertex].block == block
            ]
            self._ends[block] = max(runs, default=len(self.order.runs) - 1)
        return self._ends[block]

    def _copy(self, travel: Travel) -> tuple[str, int, int, float] | None:
        """Return the span of a tensor in another layout, until it is last read; None if it is kept, or if it is a
        gradient on its way home."""
        t, count, saved = travel.transfer, len(self.order.runs), self.evaluation.saved
        key = (t.producer, t.output, t.target)
        if travel.first == count or not travel.recomputed and travel.phase == "forward" and key in saved:
            return None
        is_parameter = is_gathered_ahead(self.problem.vertices[t.producer])
        kind = RECOMPUTED if travel.recomputed and not is_parameter else GATHERED if is_parameter else TRANSIENT
        return kind, travel.held, travel.last, self.tensors.bytes_of(*key)

    def _collective_buffers(self):
        """Iterate over the spans of what collectives of tensors that are in no bucket hold beside the tensor before and
        after: one at a time, and only while they run."""
        most: dict[int, float] = defaultdict(float)
        for travel in self.order.travels:
            t, left = travel.transfer, self._left(travel)
            value = self.problem.vertices[t.producer].values[t.output]
            is_alone = not t.is_hidden or t.bytes_ >= self.pricer.bucket_bytes
            for step in t.redistribution.steps if is_alone else ():
                if self._is_packed(step):
                    sizes = (self.pricer.bytes_of(value, layout) for layout in (step.before, step.after))
                    most[left] = max(most[left], *sizes)
        for left, bytes_ in most.items():
            yield BUCKETS, left, left, bytes_

    def _left(self, travel: Travel) -> int:
        """Return the run before which a tensor leaves: what is not gathered ahead leaves where its copy is first
        wanted."""
        is_late = not travel.transfer.is_hidden and travel.first < len(self.order.runs)
        return travel.first if is_late else travel.held

    def _is_packed(self, step: MoveStep) -> bool:
        """Return whether a collective holds other memory than that of the tensor before and after; those that gather
        dim 0 at once do not."""
        move = step.move
        is_as_it_comes = move.kind == "all_gather" and move.dim == 0 and move.parts == 1
        return move.kind != "slice" and not (is_as_it_comes and self.pricer.steps_of(move) is None)
