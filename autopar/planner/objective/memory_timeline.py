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

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...cost.memory import NEARLY_ALL
from ...cost.redistribute import MoveStep
from ..problem.problem import Problem
from ..problem.tiled_rows import share_of_piece
from ..problem.vertices import STATE, Vertex
from ..problem.weight_codes import is_gathered_ahead
from .bucket_bytes import BUCKETS, GATHERED, bucket_bytes
from .evaluate import Evaluation, is_of_one, unreduced_bytes
from .host_travels import host_travels
from .pricer import Pricer
from .side_by_side import with_the_other
from .step_order import StepOrder, Travel, one_op_a_region, step_order

PARAMETERS = "parameters"
RESIDENT = (PARAMETERS, "optimizer", "buffers")
RESERVE, KEPT = "allocator reserve", "kept keys"
HELD = ("parameter", "buffer", "constant")  # vertices that a device holds all through training
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


def resident_bytes(problem: Problem, e: Evaluation) -> dict[str, float]:
    """Return the bytes of a device that stay all through training, by kind."""
    result = dict.fromkeys(RESIDENT, 0.0)
    for v in problem.vertices:
        if v.kind in HELD:
            for kind, bytes_ in resident_of(problem, e, v).items():
                result[kind] += bytes_
    return result


def resident_of(problem: Problem, e: Evaluation, v: Vertex) -> dict[str, float]:
    """Return the bytes of one vertex that stay on a device all through training, by kind."""
    options, k = problem.choices(v.index), e.choice[v.index]
    resident = float(options.resident_bytes[k]) * problem.copies(e.first)[v.index]
    if options.strategies[k].on_host:
        return {PARAMETERS: resident}
    if v.kind != "parameter":
        return {"buffers": resident}
    trainable, state = v.node.meta["role"].trainable, v.state_bytes(problem.optimizer)
    elements = resident / state.resident(trainable)  # the copy that computes comes and goes
    return {PARAMETERS: elements * state.master, "optimizer": elements * state.optimizer if trainable else 0.0}


def live_bytes(problem: Problem, evaluation: Evaluation, pricer: Pricer) -> LiveBytes:
    """Return the memory of a device over the step that an evaluation describes."""
    count = max(len((order := step_order(problem, evaluation)).runs), 1)
    changes: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(count + 1))
    for kind, bytes_ in resident_bytes(problem, evaluation).items():
        changes[kind][0] += bytes_
    changes[RESERVE][0] += problem.reserve_bytes
    changes[TRANSIENT][0] += pricer.tail.bytes_
    for bytes_ in bucket_bytes(problem, pricer, evaluation, order).values():
        changes[BUCKETS][: len(bytes_)] += np.diff(bytes_, prepend=0.0)
    for kind, first, last, bytes_ in _Lives(problem, evaluation, pricer, order).spans():
        changes[kind][min(first, count - 1)] += bytes_
        changes[kind][min(last, count - 1) + 1] -= bytes_
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
        self.strategies = [problem.choices(v.index).strategies[evaluation.choice[v.index]] for v in problem.vertices]
        self.views = problem.views
        self._bases: dict[tuple[int, int], tuple[int, int]] = {}
        self._made: dict[tuple[int, int, int], float] = {}  # bytes by class, strategy and output
        inside = {node for region in problem.tiled_rows for node in region.ops}
        self.in_pieces = {v.index for v in problem.vertices if v.node in inside} if inside else set()
        self.copies = problem.copies(evaluation.first)
        self.run_of = {(run.vertex, run.recomputed): i for i, run in enumerate(order.runs)}
        self.first, self.last = one_op_a_region(problem, order)
        # the last reader of a tensor by phase: (vertex, output) -> run
        self.reads: dict[str, dict[tuple[int, int], int]] = {"forward": {}, "backward": {}}
        for i, run in enumerate(order.runs):
            reads = self.reads[run.phase]
            for tensor in problem.vertices[run.vertex].inputs:
                if problem.tiled:
                    self._read(tensor, run.phase, i)
                    continue
                reads[tensor] = i  # runs are in order
                if tensor[0] in self.views:
                    reads[self._base(*tensor)] = i
        for travel in order.travels:
            self._read((travel.transfer.producer, travel.transfer.output), travel.phase, self._left(travel))

    def _read(self, tensor: tuple[int, int], phase: str, position: int) -> None:
        """Note that a run reads a tensor, and what that lies in."""
        reads, base = self.reads[phase], self._base(*tensor)
        for key in (tensor,) if tensor == base else (tensor, base):
            at = position
            if self.problem.tiled and key not in self.problem.never_made and at < len(self.last):
                at = self.last[at]
            if at > reads.get(key, -1):
                reads[key] = at

    def _layout(self, vertex: int, output: int):
        return self.strategies[vertex].outputs[output]

    def _bytes(self, vertex: int, output: int, layout) -> float:
        whole = self.pricer.bytes_of(self.problem.vertices[vertex].values[output], layout)
        if (vertex, output) not in self.problem.never_made:
            return whole
        return whole * share_of_piece(self.problem, vertex, output, layout) if vertex in self.in_pieces else 0.0

    def _base(self, vertex: int, output: int) -> tuple[int, int]:
        """Return the tensor whose memory this one lies in."""
        key = vertex, output
        if vertex not in self.views:
            return key
        if key not in self._bases:
            base = key
            producer, of = self.problem.vertices[vertex].inputs[0]
            if self._layout(producer, of) == self.strategies[vertex].inputs[0]:
                base = self._base(producer, of)
            self._bases[key] = base
        return self._bases[key]

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
        for u in self.problem.vertices:
            if bytes_ := self.pricer.saved_for_rounds(u, self.strategies[u.index]):
                yield SAVED, 0, len(self.order.runs), bytes_ * self.copies[u.index]
            if u.kind == "input":
                bytes_ = self._bytes(u.index, 0, self._layout(u.index, 0)) * self.copies[u.index]
                yield TRANSIENT, 0, len(self.order.runs), bytes_
        for travel in self.order.travels:
            if span := self._copy(travel):
                yield span
        yield from self._values()

    def _values(self):
        """Iterate over the spans of what ops make and of what they allocate while they run."""
        e, vertices, never_made = self.evaluation, self.problem.vertices, self.problem.never_made
        saved = {*e.saved, *(value.key for value in e.on_host)}
        returned = {(u.producer, u.output): u for u in self.problem.uses if u.slot == STATE and u.phase == "backward"}
        covered = self._saved_as_views(saved)
        for i, run in enumerate(self.order.runs):
            v, reads = run.vertex, self.reads[run.phase]
            if inside := self.pricer.inside_bytes(vertices[v], e.choice[v]):
                yield WORKSPACE, i, i, inside
            for output, layout in enumerate(self.strategies[v].outputs):
                tensor = v, output
                if v in self.views and self._base(v, output)[0] != v:
                    continue
                if not run.recomputed and (v, output, layout) in saved:
                    continue
                use = returned.get(tensor)
                if use and self._layout(use.consumer, 0) == layout and self._keeps_gradient(use.consumer):
                    continue
                kind, last = RECOMPUTED if run.recomputed else TRANSIENT, reads.get(tensor, -1)
                bytes_ = self._made_bytes(v, output, layout)
                if not run.recomputed and covered[tensor] > NEARLY_ALL * bytes_:
                    bytes_ = max(0.0, bytes_ - covered[tensor])
                if tensor in never_made:  # by one call of an op, which begins and ends with it
                    yield kind, i, max(i, min(last, self.last[i])), bytes_
                    continue
                yield kind, self.first[i], max(i, last), bytes_

    def _beside_exchanges(self):
        """Iterate over the spans of what exchanges of rows fill, and of what these need, while ops run beside them."""
        for one in self.evaluation.beside:
            v, wait = one.vertex, self.run_of[one.vertex, False]
            filled = sum(self._made_bytes(v, o, layout) for o, layout in enumerate(self.strategies[v].outputs))
            inside = self.pricer.inside_bytes(self.problem.vertices[v], self.evaluation.choice[v])
            yield TRANSIENT, wait - len(one.ops), wait - 1, filled + inside

    def _saved_as_views(self, saved) -> dict[tuple[int, int], float]:
        """Return the bytes of each tensor that views of it save, which lie in its memory unless they are copied (see
        passes/distribute/partition.py)."""
        found: dict[tuple[int, int], float] = defaultdict(float)
        for v, output, layout in saved:
            base = self._base(v, output)
            if base[0] != v and layout == self._layout(v, output):
                found[base] += self._bytes(v, output, layout)
        return found

    def _made_bytes(self, vertex: int, output: int, layout) -> float:
        """Return the bytes of a tensor as its producer makes it, which are those of all of its class."""
        if (vertex, output) in self.problem.never_made:
            return self._bytes(vertex, output, layout)
        key = self.problem.vertices[vertex].cls, self.evaluation.choice[vertex], output
        if key not in self._made:
            self._made[key] = self._bytes(vertex, output, layout)
        return self._made[key]

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
        vertices = self.problem.vertices
        casts = {v.index for v in vertices if v.kind == "parameter" and 0 in v.casts}
        asked: dict[int, list[int]] = defaultdict(list)
        for i, run in enumerate(self.order.runs if casts else ()):
            for producer, output in vertices[run.vertex].inputs:
                at = self._base(producer, output)[0] if producer in self.views else producer
                if at in casts:
                    asked[at].append(i)
        for travel in self.order.travels:
            asked[travel.transfer.producer].append(min(travel.held, len(self.order.runs) - 1))
        for v in map(vertices.__getitem__, sorted(casts)):
            if asked[v.index] and not self.strategies[v.index].on_host:
                bytes_ = self._bytes(v.index, 0, self._layout(v.index, 0)) * self.copies[v.index]
                yield from self._of_all_copies(PARAMETERS, min(asked[v.index]), max(asked[v.index]), v, bytes_)

    def _keeps_gradient(self, vertex: int) -> bool:
        """Return whether the device holds on to a gradient that is made in the layout of this leaf."""
        return self.problem.vertices[vertex].kind == "parameter" and not self.strategies[vertex].on_host

    def _gradients(self):
        """Iterate over the spans of gradients as they are left for the optimizer. Those that wait for one reduction are
        whole from the start; others, of ZeRO-1 too, are reduced as soon as they are made."""
        e, problem, count = self.evaluation, self.problem, len(self.order.runs)
        backward = next((i for i, run in enumerate(self.order.runs) if run.phase == "backward"), 0)
        accumulated = self.pricer.micro_batches > 1  # then those of the passes before are there from the start
        if e.reduces_once:
            yield GRADIENTS, 0, count, e.whole_gradient_bytes + self._of_several_parameters()
        for use in problem.uses:
            v = problem.vertices[use.consumer]
            if use.slot != STATE or use.phase != "backward" or v.kind != "parameter":
                continue
            bytes_ = float(problem.choices(v.index).gradient_bytes[e.choice[v.index]])
            if accumulated:
                yield GRADIENTS, 0, count, bytes_ * self.copies[v.index]
                continue
            made = self.run_of.get((use.producer, False), backward)
            yield GRADIENTS, self.first[made] if self.first else made, count, bytes_
            if self.copies[v.index] > 1:
                yield GRADIENTS, self._end_of_backward(v.block), count, bytes_ * (self.copies[v.index] - 1)

    def _of_several_parameters(self) -> float:
        """Return what unreduced gradients that more than one parameter has take beyond the shards."""
        return sum(
            unreduced_bytes(self.problem, self.evaluation.choice, self.pricer, uses, self._layout(*tensor))
            * self.copies[uses[0].consumer]
            for tensor, uses in self.problem.uses_of.items()
            if self.problem.vertices[uses[0].consumer].kind == "parameter" and not is_of_one(self.problem, uses)
        )

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
        return kind, travel.held, travel.last, self._bytes(*key)

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
