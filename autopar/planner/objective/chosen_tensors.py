"""Say what the ops of a plan read and make, in bytes, as far as its choice of strategies says so: evaluations have that
in common that differ in what they compute again, or in what runs beside exchanges.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from ...ir.layout import Layout
from ..problem.problem import Problem
from ..problem.tiled import share_of_piece
from ..problem.vertices import STATE, Vertex
from .evaluate import Evaluation, is_of_one, unreduced_bytes
from .pricer import Pricer

PARAMETERS = "parameters"
RESIDENT = (PARAMETERS, "optimizer", "buffers")
HELD = ("parameter", "buffer", "constant")  # vertices that a device holds all through training
Tensor = tuple[int, int]  # vertex and output


class Made(NamedTuple):
    """A tensor that an op makes, not as a view of another nor as a gradient that stays."""

    tensor: Tensor
    layout: Layout
    bytes_: float


class ChosenTensors:
    """The tensors of a plan as its vertices make and read them."""

    def __init__(self, problem: Problem, choice: dict[int, int], first: int, pricer: Pricer):
        self.problem, self.choice, self.first, self.pricer = problem, choice, first, pricer
        self.strategies, self.views = problem.chosen(choice).strategies, problem.views
        self.copies = problem.copies(first)
        inside = {node for region in problem.tiled_rows for node in region.ops}
        self.in_pieces = {v.index for v in problem.vertices if v.node in inside} if inside else set()
        self._bases: dict[Tensor, Tensor] = {}
        self._made: dict[tuple[int, int, int], float] = {}  # bytes by class, strategy and output

    def layout(self, vertex: int, output: int) -> Layout:
        """Return the layout in which a vertex gives an output."""
        return self.strategies[vertex].outputs[output]

    def bytes_of(self, vertex: int, output: int, layout: Layout) -> float:
        """Return the bytes of a tensor in a layout, of one that is never whole those of a piece."""
        whole = self.pricer.bytes_of(self.problem.vertices[vertex].values[output], layout)
        if (vertex, output) not in self.problem.never_made:
            return whole
        return whole * share_of_piece(self.problem, vertex, output, layout) if vertex in self.in_pieces else 0.0

    def base(self, vertex: int, output: int) -> Tensor:
        """Return the tensor whose memory this one lies in."""
        key = vertex, output
        if vertex not in self.views:
            return key
        if key not in self._bases:
            base = key
            producer, of = self.problem.vertices[vertex].inputs[0]
            if self.layout(producer, of) == self.strategies[vertex].inputs[0]:
                base = self.base(producer, of)
            self._bases[key] = base
        return self._bases[key]

    def made_bytes(self, vertex: int, output: int, layout: Layout) -> float:
        """Return the bytes of a tensor as its producer makes it, which are those of all of its class."""
        if (vertex, output) in self.problem.never_made:
            return self.bytes_of(vertex, output, layout)
        key = self.problem.vertices[vertex].cls, self.choice[vertex], output
        if key not in self._made:
            self._made[key] = self.bytes_of(vertex, output, layout)
        return self._made[key]

    def keeps_gradient(self, vertex: int) -> bool:
        """Return whether the device holds on to a gradient that is made in the layout of this leaf."""
        return self.problem.vertices[vertex].kind == "parameter" and not self.strategies[vertex].on_host

    @cached_property
    def made(self) -> Sequence[Sequence[Made]]:
        """Return, by vertex, what it makes: not the views, nor the gradients that stay."""
        returned = {(u.producer, u.output): u for u in self.problem.uses if u.slot == STATE and u.phase == "backward"}
        found: list[list[Made]] = []
        for v, strategy in enumerate(self.strategies):
            found.append([])
            for output, layout in enumerate(strategy.outputs):
                if v in self.views and self.base(v, output)[0] != v:
                    continue
                use = returned.get((v, output))
                if use and self.layout(use.consumer, 0) == layout and self.keeps_gradient(use.consumer):
                    continue
                if self.problem.vertices[v].kind == "op":
                    found[-1].append(Made((v, output), layout, self.made_bytes(v, output, layout)))
        return found

    @cached_property
    def inside(self) -> Sequence[float]:
        """Return the bytes that each op allocates while it runs, by vertex."""
        inside_bytes, choice = self.pricer.inside_bytes, self.choice
        return [inside_bytes(v, choice[v.index]) if v.kind == "op" else 0.0 for v in self.problem.vertices]

    @cached_property
    def reads(self) -> Sequence[Sequence[Tensor]]:
        """Return, by vertex, the tensors that it reads, and what those that are views lie in."""
        views = self.views
        return [
            [key for tensor in v.inputs for key in ((tensor, self.base(*tensor)) if tensor[0] in views else (tensor,))]
            for v in self.problem.vertices
        ]

    @cached_property
    def casts(self) -> dict[int, float]:
        """Return the parameters that compute in another type than they are kept in, with the bytes of that copy."""
        casts = [v.index for v in self.problem.vertices if v.kind == "parameter" and 0 in v.casts]
        return {v: self.bytes_of(v, 0, self.layout(v, 0)) for v in casts}

    @cached_property
    def casts_read(self) -> Sequence[Sequence[int]]:
        """Return, by vertex, those of them that it reads, themselves or as views."""
        views, casts = self.views, self.casts
        read = [[self.base(*one)[0] if one[0] in views else one[0] for one in v.inputs] for v in self.problem.vertices]
        return [[v for v in own if v in casts] for own in read]

    @cached_property
    def gradients(self) -> Sequence[tuple[int, Vertex, float]]:
        """Return what makes the gradient of each parameter, for each of its uses, with the parameter and the bytes of
        its shard."""
        vertices, choices = self.problem.vertices, self.problem.choices
        uses = [u for u in self.problem.uses if u.slot == STATE and u.phase == "backward"]
        return [
            (u.producer, v, float(choices(v.index).gradient_bytes[self.choice[v.index]]))
            for u in uses
            if (v := vertices[u.consumer]).kind == "parameter"
        ]

    @cached_property
    def inputs(self) -> Sequence[tuple[int, float]]:
        """Return the inputs of the call with their bytes."""
        inputs = [v.index for v in self.problem.vertices if v.kind == "input"]
        return [(v, self.bytes_of(v, 0, self.layout(v, 0))) for v in inputs]

    @cached_property
    def for_rounds(self) -> Sequence[tuple[int, float]]:
        """Return the vertices that keep something for further rounds of rows, with its bytes."""
        each = [(v.index, self.pricer.saved_for_rounds(v, self.strategies[v.index])) for v in self.problem.vertices]
        return [(v, bytes_) for v, bytes_ in each if bytes_]

    @cached_property
    def resident(self) -> dict[str, float]:
        """Return the bytes of a device that stay all through training, by kind."""
        result = dict.fromkeys(RESIDENT, 0.0)
        for v in self.problem.vertices:
            if v.kind in HELD:
                for kind, bytes_ in resident_of(self.problem, self.choice, self.copies, v).items():
                    result[kind] += bytes_
        return result

    @cached_property
    def unreduced(self) -> dict[Tensor, float]:
        """Return the gradients that are larger as they are made than their shards, with what they are more, in
        bytes."""
        each = {
            tensor: unreduced_bytes(self.problem, self.choice, self.pricer, uses, self.layout(*tensor))
            for tensor, uses in self.problem.uses_of.items()
        }
        return {tensor: bytes_ for tensor, bytes_ in each.items() if bytes_}

    @cached_property
    def of_several_parameters(self) -> float:
        """Return what unreduced gradients that more than one parameter has take beyond the shards."""
        uses_of, total = self.problem.uses_of, 0.0
        for tensor, bytes_ in self.unreduced.items():
            if not is_of_one(self.problem, uses_of[tensor]):
                total += bytes_ * self.copies[uses_of[tensor][0].consumer]
        return total

    def as_views(self, saved) -> dict[Tensor, float]:
        """Return the bytes of each tensor that views of it save, which lie in its memory unless they are copied (see
        passes/distribute/partition.py)."""
        found: dict[Tensor, float] = defaultdict(float)
        for v, output, layout in saved:
            if v in self.views:
                base = self.base(v, output)
                if base[0] != v and layout == self.layout(v, output):
                    found[base] += self.bytes_of(v, output, layout)
        return found


def resident_of(problem: Problem, choice: dict[int, int], copies: Sequence[int], v: Vertex) -> dict[str, float]:
    """Return the bytes of one vertex that stay on a device all through training, by kind."""
    options, k = problem.choices(v.index), choice[v.index]
    resident = float(options.resident_bytes[k]) * copies[v.index]
    if options.strategies[k].on_host:
        return {PARAMETERS: resident}
    if v.kind != "parameter":
        return {"buffers": resident}
    trainable, state = v.node.meta["role"].trainable, v.state_bytes(problem.optimizer)
    elements = resident / state.resident(trainable)  # the copy that computes comes and goes
    return {PARAMETERS: elements * state.master, "optimizer": elements * state.optimizer if trainable else 0.0}


def chosen_tensors(problem: Problem, e: Evaluation, pricer: Pricer) -> ChosenTensors:
    """Return the tensors of a plan; those of the last choice that was asked for are known."""
    known = pricer.known_tensors
    is_known = known and known[0].choice is e.choice and known[0].problem is problem and known[0].first == e.first
    if not is_known:
        known[:] = [ChosenTensors(problem, e.choice, e.first, pricer)]
    return known[0]
