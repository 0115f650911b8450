"""Price the parts of a cut model under one plan of the whole of it: seconds, bytes, and what passes from part to
part.

A plan decides how every op of one micro-batch is sharded; autopar/ir/stage_placement.py says in which part each op
runs. So a part's cost is a sum over its ops, the transfers for them and what they hold. What several parts need (a mask
that each computes, a copy that each gathers) is counted in the first of them, so that parts add up to the plan, or,
`repeated`, in each of them, as stages run it.

W, the part of the backward that may wait, is what only one parameter's gradient follows from
(passes/pipeline/split_backward.py).
"""

from __future__ import annotations

import copy
import math
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, starmap

import numpy as np
import torch
from torch import fx

from ...ir.graph import bytes_of, is_op, is_tensor, output_node, tensor_of
from ...ir.stage_placement import StagePlacement, first_of
from ...ops import ATTENTION, autopar
from ..objective.bucket_bytes import BUCKETS, GATHERED, bucket_bytes
from ..objective.checkpoint_blocks import recomputed_vertices
from ..objective.checkpoint_min_cut import key_of
from ..objective.chosen_tensors import HELD, PARAMETERS, chosen_tensors, resident_of
from ..objective.evaluate import Evaluation, Transfer
from ..objective.host_travels import host_travels
from ..objective.memory_timeline import (
    GRADIENTS,
    RECOMPUTED,
    TRANSIENT,
    WORKSPACE,
    LiveBytes,
    live_bytes,
)
from ..objective.pricer import Pricer
from ..problem.problem import Problem
from ..problem.vertices import STATE, Vertex
from ..spmd.outputs import bytes_of_outputs
from .kept_keys import add_growing, add_kept
from .part import FORWARD, INPUT, WEIGHT, Part, no_work

COMING_AND_GOING = (RECOMPUTED, GATHERED, TRANSIENT, BUCKETS, WORKSPACE)
SEVERAL = ""  # in place of a parameter's name: the gradients of several follow from an op


@dataclass(frozen=True)
class SharedParameter:
    """A parameter of several parts, in order: bytes that each holds for it, by kind, and of the gradient that they add
    up."""

    parts: tuple[int, ...]
    kinds: dict[str, float]
    gradient_bytes: float

    @property
    def state_bytes(self) -> float:
        """Return the bytes of all kinds that a copy of the parameter takes."""
        return sum(self.kinds.values())


class Parts:
    """The costs of a plan cut at forward ops: `found`, a Part for each stretch between cuts, and `tied` parameters.
    `live`: the memory of the whole plan, if it is known. What is computed again and what is beside exchanges is added
    last, so that the same parts under a plan that differs in that alone take less time (`under`)."""

    def __init__(
        self,
        problem: Problem,
        e: Evaluation,
        pricer: Pricer,
        cuts: Sequence[str],
        repeated: bool = False,
        live: LiveBytes | None = None,
        stretch: float = 1.0,
    ):
        self.problem, self.e, self.pricer, self.cuts, self.repeated = problem, e, pricer, cuts, repeated
        self.placement = problem.placement(cuts)
        chosen = problem.chosen(e.choice)
        self.strategies, self.seconds = chosen.strategies, chosen.seconds
        self.found = [Part(no_work(e.streams), e.overlap, stretch) for _ in range(self.placement.count)]
        self.tied: list[SharedParameter] = []
        self.where = parts_of_nodes(self.placement)
        waiting = [t for t in e.transfers if t.phase == "forward" and t.times < pricer.micro_batches]
        self.once = {
            key_of(t): parts_of_transfer(self.problem, self.where, t) for t in waiting
        }  # by copy that all micro-batches share, the parts that make it
        self.gradient_of = gradients_of(problem.graph)
        self._vertices()
        self._transfers(e.transfers)
        self._passing()
        self._outputs()
        self._without = [part.apart() for part in self.found]  # before anything is computed again, or beside anything
        self._adapt(live)

    def under(self, e: Evaluation, live: LiveBytes | None = None, stretch: float = 1.0) -> Parts:
        """Return the parts of the same cut under the same plan with other ops computed again, or beside exchanges;
        `live` and `stretch` as of that one."""
        old, new = self.e.transfers, e.transfers
        is_alike = e.choice is self.e.choice and len(new) == len(old) and all(map(operator.is_, new, old))
        if not is_alike:  # copies that are kept for what is computed again travel once
            return Parts(self.problem, e, self.pricer, self.cuts, self.repeated, live, stretch)
        other = copy.copy(self)
        other.e, other.found = e, [replace(part.apart(), stretch=stretch) for part in self._without]
        other._adapt(live)
        return other

    def _adapt(self, live: LiveBytes | None) -> None:
        """Charge what depends on what is computed again, and what is beside exchanges of rows."""
        self._beside()
        self.recomputed = recomputed_vertices(self.e)
        for v in self.recomputed:
            seconds = self.seconds[v]
            for part in self._charged(self.where.get(self.problem.vertices[v].node, 0)):
                part.work[INPUT].recompute += seconds
        self._transfers(self.e.recompute_transfers)
        self._saved()
        self._on_host()
        self._transients(live or live_bytes(self.problem, self.e, self.pricer))

    def _beside(self) -> None:
        """Put the seconds of exchanges of rows that ops are beside there, too."""
        for v, one in {one.vertex: one for one in self.e.beside}.items():
            node = self.problem.vertices[v].node
            for part in self._charged(self.where.get(node, 0)):
                work = part.work[self._kind(node)]
                work.compute -= one.seconds
                work.every.hidden[one.stream] += one.seconds

    def _charged(self, mask: int) -> Iterator[Part]:
        """Iterate over the parts that pay for something that the parts of a mask need."""
        if not self.repeated or not mask:
            yield self.found[first_of(mask, 0)]
            return
        while mask:
            yield self.found[first_of(mask, 0)]
            mask &= mask - 1

    def _strategy(self, vertex: int):
        return self.strategies[vertex]

    def _vertices(self) -> None:
        micro_batches = self.pricer.micro_batches
        whole, copies = self._whole_bytes(), self.problem.copies(self.e.first)
        for v in self.problem.vertices:
            if v.kind == "output":
                continue
            options, k = self.problem.choices(v.index), self.e.choice[v.index]
            seconds, mask = self.seconds[v.index], self.where.get(v.node, 0)
            if v.node.target is autopar.with_earlier.default:
                for part in self._charged(mask):
                    add_kept(part, v, self.pricer.bytes_of(v.values[0], options.strategies[k].outputs[0]))
            elif v.node.target in ATTENTION and self.pricer.problem.staying:
                made = zip(v.values[1:3], options.strategies[k].outputs[1:3]) if v.phase == "backward" else ()
                grows = sum(starmap(self.pricer.bytes_of, made)) + self.pricer.inside_bytes(v, k)
                for part in self._charged(mask):
                    add_growing(part, v, grows)
            if v.kind == "op":
                self._op(v, seconds, mask)
                continue
            options, k = self.problem.choices(v.index), self.e.choice[v.index]
            resident = resident_of(self.problem, self.e.choice, copies, v) if v.kind in HELD else {}
            gradient, waiting = float(options.gradient_bytes[k]), whole.get(v.index, 0.0)
            copy = 0.0
            casts = v.kind == "parameter" and 0 in v.casts and not options.strategies[k].on_host
            if casts and self._is_read_alone(v.index):
                copy = self.pricer.bytes_of(v.values[0], options.strategies[k].outputs[0])
            for part in self._charged(mask):
                part.parameter_seconds += seconds * micro_batches
                part.resident.update(resident)
                part.gradient_bytes += gradient
                part.whole_bytes += waiting
                part.computing_bytes += copy
                part.parameters += v.node.meta["val"].numel() if v.kind == "parameter" else 0
            if v.kind == "parameter" and mask.bit_count() > 1:
                parts = tuple(i for i in range(len(self.found)) if mask >> i & 1)
                kinds = Counter(resident) + Counter({PARAMETERS: copy, GRADIENTS: gradient + waiting})
                self.tied.append(SharedParameter(parts, dict(kinds), gradient))

    def _op(self, v: Vertex, seconds: float, mask: int) -> None:
        """Charge an op to the parts that run it."""
        kind, module = self._kind(v.node), v.node.meta.get("module", "")
        is_named = module and v.phase != "backward" and v.node not in self.placement.free
        for part in self._charged(mask):
            part.work[kind].compute += seconds
            if is_named:
                part.modules.append(module)

    def _is_read_alone(self, parameter: int) -> bool:
        """Return whether micro-batches read, or gather, a parameter itself, and not only copies that were gathered
        once."""
        uses = [u for u in self.problem.uses_of[parameter, 0] if u.slot != STATE]
        return any((parameter, 0, self._strategy(u.consumer).inputs[u.slot]) not in self.once for u in uses) or not uses

    def _kind(self, node: fx.Node) -> str:
        if node.meta["phase"] != "backward":
            return FORWARD
        return WEIGHT if self.gradient_of.get(node, SEVERAL) != SEVERAL else INPUT

    def _whole_bytes(self) -> dict[int, float]:
        """Return by parameter how much larger its gradient is before its reduction, in bytes, where that waits for all
        micro-batches."""
        found: dict[int, float] = {}
        if self.e.reduces_once:
            for tensor, bytes_ in chosen_tensors(self.problem, self.e, self.pricer).unreduced.items():
                parameter = self.problem.uses_of[tensor][0].consumer
                found[parameter] = found.get(parameter, 0.0) + bytes_
        return found

    def _transfers(self, transfers: Sequence[Transfer]) -> None:
        for t in transfers:
            self._transfer(t, parts_of_transfer(self.problem, self.where, t))

    def _transfer(self, t: Transfer, mask: int) -> None:
        seconds, micro_batches = t.seconds * t.copies, self.pricer.micro_batches
        kinds = {self._kind(v.node) for c in t.consumers if (v := self.problem.vertices[c]).kind == "op"}
        kind = FORWARD if t.phase == "forward" else INPUT if kinds - {WEIGHT} else WEIGHT
        for part in self._charged(mask):
            work = part.work[kind]
            if t.times < micro_batches:
                work.once.add(t.split, seconds * micro_batches, t.is_hidden)
            else:
                work.every.add(t.split, seconds, t.is_hidden)

    def _saved(self) -> None:
        uses_of, vertices = self.problem.uses_of, self.problem.vertices
        for (v, output, layout), bytes_ in self.e.saved.items():
            if (v, output, layout) in self.once:
                for part in self._charged(self.once[v, output, layout]):
                    part.retained_bytes += bytes_
                continue
            exact = mask = 0
            for use in uses_of[v, output]:
                consumer = vertices[use.consumer]
                if consumer.kind == "op" and (use.phase == "backward" or use.consumer in self.recomputed):
                    mask |= self.where.get(consumer.node, 0)
                    if self._strategy(use.consumer).inputs[use.slot] == layout:
                        exact |= self.where.get(consumer.node, 0)
            for part in self._charged(exact or mask or self.where.get(vertices[v].node, 0)):
                part.saved_bytes += bytes_

    def _on_host(self) -> None:
        """Charge the copies of values that wait on the host, there in the forward and back in the backward."""
        for value in self.e.on_host:
            for part in self._charged(self.where[self.problem.vertices[value.key[0]].node]):
                part.host_bytes += value.bytes_
                for kind in (FORWARD, INPUT):
                    every = part.work[kind].every
                    part.work[kind].every = replace(every, host=every.host + value.seconds)

    def _passing(self) -> None:
        """Record what is sent over each border: from where it is made to its last reader, or back to its first one."""
        for node, at in self.placement.stage.items():
            mask = self.placement.read_at.get(node, 0)
            if mask & ~(1 << at) and is_tensor(node):
                last, first, bytes_ = mask.bit_length() - 1, first_of(mask, at), self._local_bytes(node)
                for border in range(at, last):
                    self.found[border].sent.append(bytes_)
                for border in range(first, at):
                    self.found[border].returned.append(bytes_)

    def _outputs(self) -> None:
        """Add up the bytes of what leaves the call, in the layout in which it does."""
        for value, bytes_ in bytes_of_outputs(self.problem, self.e, self.pricer):
            self.found[first_of(self.where[value], 0)].output_bytes += bytes_

    def _local_bytes(self, node: fx.Node) -> float:
        producer, item = tensor_of(node)
        values = producer.meta["val"]
        position = 0 if isinstance(values, torch.Tensor) else sum(isinstance(x, torch.Tensor) for x in values[:item])
        if (tensor := self.problem.vertex_of.get((producer, position))) is None:
            return float(bytes_of(node.meta["val"]))
        v, output = tensor
        return self.pricer.bytes_of(node.meta["val"], self._strategy(v).outputs[output])

    @cached_property
    def _masks(self) -> tuple[list[int], np.ndarray]:
        """Return all sets of parts that a vertex is in, and by vertex the number of its set."""
        numbers: dict[int, int] = {}
        number = [numbers.setdefault(self.where.get(v.node, 0), len(numbers)) for v in self.problem.vertices]
        return list(numbers), np.array(number)

    def _transients(self, live: LiveBytes) -> None:
        transient = [live.kinds[kind] for kind in COMING_AND_GOING if kind in live.kinds]
        later = bucket_bytes(self.problem, self.pricer, self.e, live.order)[BUCKETS]  # not beside the activations
        if not self.e.reduces_once:
            later[:] = 0.0
        for part in self.found if self.e.reduces_once else ():
            part.reducing_bytes = min(float(later.max(initial=0.0)), 2 * (part.gradient_bytes + part.whole_bytes))
        held = sum(transient, np.zeros(len(live.order.runs))) - later
        for travel in host_travels(self.problem, self.e, live.order):
            held[travel.made : travel.end + 1] += travel.value.bytes_
            held[travel.start : travel.last + 1] += travel.value.bytes_
        masks, number = self._masks
        most = np.zeros(len(masks))  # by the parts that a run is in
        np.maximum.at(most, number[[run.vertex for run in live.order.runs]], held)
        for mask, bytes_ in zip(masks, most.tolist()):
            for part in self._charged(mask) if bytes_ else ():
                part.transient_bytes = max(part.transient_bytes, bytes_)


def parts_of_transfer(problem: Problem, where: Mapping[fx.Node, int], t: Transfer) -> int:
    """Return the parts that make a transfer, as bits: those of its readers, or, of a gradient for its parameter, where
    it is made. `where`: the parts of every node."""
    vertices, mask = problem.vertices, 0
    for consumer in t.consumers:
        if vertices[consumer].kind == "op":
            mask |= where.get(vertices[consumer].node, 0)
    return mask or where.get(vertices[t.producer].node, 0)


def parts_of_nodes(placement: StagePlacement) -> dict[fx.Node, int]:
    """Return the parts of every node, as bits: of what is computed wherever it is read, those that read it."""
    where: dict[fx.Node, int] = {}
    for node in reversed(placement.graph.nodes):
        if node.op == "output":
            continue
        if node in placement.terms:
            where[node] = placement.parameters[placement.terms[node]]
        elif node in placement.stage:
            where[node] = 1 << placement.stage[node]
        else:
            mask = 0
            for user in node.users:
                mask |= where.get(user, 0)
            where[node] = mask
    return where


def gradients_of(graph: fx.Graph) -> dict[fx.Node, str]:
    """Return by node of the backward the parameter whose gradient alone follows from it, or SEVERAL."""
    output = output_node(graph)
    found: dict[fx.Node, str] = {}
    for value, role in zip(output.args[0], output.meta["roles"]):
        if role is not None and not role.is_forward and isinstance(value, fx.Node):
            name = role.name if role.kind == "gradient" and found.get(value, role.name) == role.name else SEVERAL
            found[value] = name
    for node in reversed(graph.nodes):
        for user in node.users:
            if user in found:
                found[node] = found[user] if found.get(node, found[user]) == found[user] else SEVERAL
    return found


def crossing_bytes(
    problem: Problem, e: Evaluation, pricer: Pricer, free: set[fx.Node]
) -> tuple[list[fx.Node], list[float]]:
    """Return the forward ops in order, but for what every stage computes itself, and the bytes of a device that pass a
    cut before each: infinitely many where rows of experts do, of which no stage knows how many it is sent."""
    order = [n for n in problem.graph.nodes if is_op(n) and n.meta["phase"] == "forward" and n not in free]
    index = {node: i for i, node in enumerate(order)}
    change = [0.0] * (len(order) + 1)
    rows = [0] * (len(order) + 1)
    for v in problem.vertices:
        if v.kind != "op" or v.node not in index:
            continue
        strategy, last = problem.choices(v.index).strategies[e.choice[v.index]], {}
        for user in v.node.users:
            item = tensor_of(user)[1] if tensor_of(user)[0] is v.node and user is not v.node else 0
            for reader in user.users if tensor_of(user)[0] is v.node and user is not v.node else (user,):
                last[item] = max(last.get(item, -1), index.get(reader, -1))
        values = v.node.meta["val"]
        for item, end in last.items():
            position = (
                0 if isinstance(values, torch.Tensor) else sum(isinstance(x, torch.Tensor) for x in values[:item])
            )
            if end > index[v.node]:
                has_rows = bool(strategy.outputs[position].owned_axes)
                rows[index[v.node] + 1] += has_rows
                rows[end + 1] -= has_rows
                change[index[v.node] + 1] += (bytes_ := pricer.bytes_of(v.values[position], strategy.outputs[position]))
                change[end + 1] -= bytes_
    passing = zip(accumulate(change[:-1]), accumulate(rows[:-1]))
    return order, [math.inf if has_rows else bytes_ for bytes_, has_rows in passing]
