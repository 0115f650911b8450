"""What a plan costs, recomputed on the unfolded graph: every tensor, every redistribution, every byte that stays.

This is the judge of the solver: the objective of a solution must equal the cost found here. A tensor is redistributed once
for all consumers of a phase that want the same layout. A forward tensor that the backward reads is saved in its producer's
layout, in a copy that the forward made anyway, or both; with a price on memory each tensor decides that for itself:

    keep copy q          price * bytes(q)
    make q again         seconds(p -> q), and the base must be saved: price * bytes(p), nothing for a parameter (always there)
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from ..cost.redistribute import Redistribution, Redistributor, Step
from ..layout import Layout, largest_local_numel
from .problem import STATE, Problem, Use

RESIDENT_LEAVES = ("parameter", "buffer", "input", "constant", "tangent", "random")  # their base never has to be saved


@dataclass(frozen=True)
class Transfer:
    """A redistribution that the plan makes: of which tensor, in which phase, from and to which layout, and its price."""

    producer: int
    output: int
    phase: str
    source: Layout
    target: Layout
    seconds: float
    redistribution: Redistribution
    bytes_: int  # global
    consumers: tuple[int, ...]

    @property
    def step_seconds(self) -> list[tuple[Step, float]]:
        """The steps with what the plan charges for each: a tensor in a bucket pays part of the latency."""
        r = self.redistribution
        charged = self.seconds / max(r.latency_seconds + r.seconds_per_byte * self.bytes_, 1e-30)
        return [(s, charged * (s.latency_seconds + s.seconds_per_byte * self.bytes_)) for s in r.steps]


@dataclass
class Evaluation:
    """Cost of one complete choice. Bytes are per device, for the device that holds most."""

    compute_seconds: float
    transfers: list[Transfer]
    resident_bytes: float
    saved: dict[tuple[int, int, Layout], float]  # saved for the backward: (vertex, output, layout) -> bytes
    kept: set[tuple[int, int, Layout]] = field(default_factory=set)  # copies of the forward that the backward reuses
    choice: dict[int, int] = field(default_factory=dict)  # strategy of every vertex
    recomputed_blocks: list[str] = field(default_factory=list)
    recompute_seconds: float = 0.0
    whole_gradient_bytes: float = 0.0  # what ZeRO-1's unreduced gradients take beyond their shards
    transient_bytes: float = 0.0  # one recomputed block, alive again during its backward

    @property
    def communication_seconds(self) -> float:
        return sum(t.seconds for t in self.transfers)

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.communication_seconds + self.recompute_seconds

    @property
    def saved_bytes(self) -> float:
        return sum(self.saved.values())

    @property
    def bytes_(self) -> float:
        return self.resident_bytes + self.saved_bytes + self.whole_gradient_bytes + self.transient_bytes


class Pricer:
    """Prices redistributions of a problem's tensors, for pairs of layouts and for whole lists of them."""

    def __init__(self, problem: Problem, redistribute: Redistributor, bucket_bytes: float):
        self.problem, self.redistribute, self.bucket_bytes = problem, redistribute, bucket_bytes
        self._pairs: dict[tuple, tuple[np.ndarray, np.ndarray]] = {}
        self._local: dict[tuple, float] = {}

    def is_bucketed(self, producer: int, slots) -> bool:
        """Whether the tensor is a parameter or a gradient: those travel in buckets and share the latency of one."""
        return self.problem.vertices[producer].kind == "parameter" or STATE in slots

    def latency_share(self, bytes_: int, bucketed: bool) -> float:
        return min(1.0, bytes_ / self.bucket_bytes) if bucketed else 1.0

    def seconds(self, source: Layout, target: Layout, bytes_: int, bucketed: bool) -> float:
        r = self.redistribute(source, target)
        if r is None:
            return np.inf
        return r.latency_seconds * self.latency_share(bytes_, bucketed) + r.seconds_per_byte * bytes_

    def matrix(
        self, sources: tuple[Layout, ...], targets: tuple[Layout, ...], bytes_: int, bucketed: bool
    ) -> np.ndarray:
        """Seconds for every (source, target), inf where impossible."""
        key = (sources, targets)
        if key not in self._pairs:
            latency = np.full((len(sources), len(targets)), np.inf)
            per_byte = np.zeros_like(latency)
            for (i, p), (j, q) in itertools.product(enumerate(sources), enumerate(targets)):
                r = self.redistribute(p, q)
                if r is not None:
                    latency[i, j], per_byte[i, j] = r.latency_seconds, r.seconds_per_byte
            self._pairs[key] = latency, per_byte
        latency, per_byte = self._pairs[key]
        return latency * self.latency_share(bytes_, bucketed) + per_byte * bytes_

    def local_bytes(self, producer: int, output: int, layout: Layout) -> float:
        """Bytes on the device that holds most of a tensor in this layout."""
        v = self.problem.vertices[producer]
        value = v.values[output]
        key = (tuple(value.shape), value.element_size(), layout)
        if key not in self._local:
            self._local[key] = float(largest_local_numel(value.shape, layout, self.problem.mesh) * value.element_size())
        return self._local[key]


def uses_by_tensor(problem: Problem) -> dict[tuple[int, int], list[Use]]:
    result: dict[tuple[int, int], list[Use]] = defaultdict(list)
    for use in problem.uses:
        result[use.producer, use.output].append(use)
    return result


def evaluate(
    problem: Problem,
    choice: dict[int, int],
    pricer: Pricer,
    byte_price: float = 0.0,
    keep_parameters: bool | None = None,
    whole_gradients: bool = False,
) -> Evaluation:
    """Cost of choosing strategy `choice[vertex]` for every vertex of the unfolded graph.

    `byte_price` (seconds per byte) decides what is kept for the backward; `keep_parameters` overrides it for gathered
    parameters (False gathers again, ZeRO-3; True keeps, ZeRO-1 and 2). `whole_gradients`: ZeRO-1, where gradients are whole
    until they are reduced."""
    compute = resident = 0.0
    for v in problem.vertices:
        options = problem.choices(v.index)
        compute += float(options.seconds[choice[v.index]])
        resident += float(options.resident_bytes[choice[v.index]])
    result = Evaluation(compute, [], resident, {}, choice=choice)
    for (producer, output), uses in uses_by_tensor(problem).items():
        _tensor(problem, choice, pricer, byte_price, keep_parameters, result, producer, output, uses)
        if (
            whole_gradients
            and any(u.slot == STATE for u in uses)
            and problem.vertices[uses[0].consumer].kind == "parameter"
        ):
            master = problem.vertices[uses[0].consumer]
            shard = problem.choices(master.index).strategies[choice[master.index]].outputs[0]
            whole = pricer.local_bytes(master.index, 0, Layout.replicated(len(shard.dims)))
            result.whole_gradient_bytes += whole - pricer.local_bytes(master.index, 0, shard)
    return result


def _tensor(problem, choice, pricer, byte_price, keep_parameters, result, producer, output, uses) -> None:
    vertex = problem.vertices[producer]
    source = problem.choices(producer).strategies[choice[producer]].outputs[output]
    bytes_ = problem.tensor_bytes[producer, output]
    bucketed = pricer.is_bucketed(producer, [u.slot for u in uses])
    wanted: dict[str, dict[Layout, list[int]]] = {"forward": {}, "backward": {}}
    reads_base = False
    for use in uses:
        strategy = problem.choices(use.consumer).strategies[choice[use.consumer]]
        target = strategy.outputs[0] if use.slot == STATE else strategy.inputs[use.slot]
        if target != source:
            wanted[use.phase].setdefault(target, []).append(use.consumer)
        elif use.phase == "backward":
            reads_base = True

    def transfer(target: Layout, phase: str, consumers: list[int]) -> None:
        seconds = pricer.seconds(source, target, bytes_, bucketed)
        result.transfers.append(
            Transfer(producer, output, phase, source, target, seconds, pricer.redistribute(source, target), bytes_,
                     tuple(consumers))
        )  # fmt: skip

    for target, consumers in wanted["forward"].items():
        transfer(target, "forward", consumers)
    is_parameter, is_leaf = vertex.kind == "parameter", vertex.kind in RESIDENT_LEAVES
    if vertex.phase == "backward" and not is_leaf:
        for target, consumers in wanted["backward"].items():
            transfer(target, "backward", consumers)
        return
    size = {t: pricer.local_bytes(producer, output, t) for t in wanted["backward"]}
    shared = [t for t in wanted["backward"] if t in wanted["forward"]]
    if is_leaf and not is_parameter:
        keep = set(shared)
    elif is_parameter and keep_parameters is not None:
        keep = set(shared) if keep_parameters else set()
    else:
        price = {t: pricer.seconds(source, t, bytes_, bucketed) for t in shared}
        keep = {t for t in shared if byte_price * size[t] <= price[t]}
        needs_base = is_leaf or reads_base or len(shared) < len(wanted["backward"])
        if not needs_base and keep != set(shared):
            base = byte_price * pricer.local_bytes(producer, output, source)
            with_base = base + sum(byte_price * size[t] if t in keep else price[t] for t in shared)
            if byte_price * sum(size[t] for t in shared) <= with_base:
                keep = set(shared)
    redone = [t for t in wanted["backward"] if t not in keep]
    for target in redone:
        transfer(target, "backward", wanted["backward"][target])
    for target in keep:
        result.kept.add((producer, output, target))
        if not is_leaf or is_parameter:
            result.saved[producer, output, target] = size[target]
    if (redone or reads_base) and not is_leaf:
        result.saved[producer, output, source] = pricer.local_bytes(producer, output, source)
