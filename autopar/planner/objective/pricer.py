"""Price the redistributions of a problem's tensors, in seconds and in bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch

from ...cost.expert_copies import copies_of
from ...cost.expert_load import load_of, load_of_rows
from ...cost.hierarchy import InSteps
from ...cost.moves import Move
from ...cost.redistribute import Redistribution, Redistributor
from ...cost.skew import Skew
from ...cost.transfer_prices import TransferPrices
from ...ir.graph import operand
from ...ir.layout import Layout, largest_local_numel
from ...ops.kept_keys import own_share
from ...rules import Strategy
from ..problem.problem import Problem
from ..problem.vertices import STATE, Vertex
from ..problem.weight_codes import is_gathered_ahead
from .round_bytes import round_bytes, saved_bytes
from .tail_cost import NO_TAIL, TailCost
from .workspace import inside_bytes


def average_fill(sizes: Sequence[int], bucket_bytes: float) -> float:
    """Return the average bytes of the buckets in which tensors of these sizes travel, in this order. They are packed as
    in passes/distribute/bucket.py; tensors that are no smaller than a bucket travel alone and do not count."""
    shared, buckets, filled, is_alone = 0.0, 0, 0.0, True
    for size in sizes:
        if size >= bucket_bytes:
            is_alone = True
            continue
        if is_alone or filled + size > bucket_bytes:
            buckets, filled, is_alone = buckets + 1, 0.0, False
        shared, filled = shared + size, filled + size
    return shared / buckets if buckets else bucket_bytes


@dataclass(frozen=True, eq=False)
class Pricer:
    """Prices redistributions of a problem's tensors, for pairs of layouts and for whole lists of them. A step has
    `micro_batches` passes; with `reduces_once` their gradients wait for one reduction
    (autopar/planner/spmd/accumulation.py), with `gathers_once` they share the copies of parameters that are kept.
    Gradients travel in `reduce_dtype`, if that is narrower than they are, while they are added up. `other_load`: of
    experts, instead of the problem's. So many micro-batches are `in_flight`: what each saves for its backward is held
    at once; `tail`: of the step that they wait for, if it has one."""

    problem: Problem
    prices: TransferPrices
    bucket_bytes: float
    micro_batches: int = 1
    reduces_once: bool = False
    gathers_once: bool = False
    reduce_dtype: torch.dtype | None = None
    other_load: Skew | None = None
    in_flight: float = 1.0
    tail: TailCost = NO_TAIL
    known_tensors: list = field(default_factory=list, init=False, repr=False)  # see chosen_tensors.py
    _local: dict[tuple, float] = field(default_factory=dict, init=False, repr=False)
    _inside: dict[tuple[int, int], float] = field(default_factory=dict, init=False, repr=False)
    _tables: dict[tuple[float, float], np.ndarray] = field(default_factory=dict, init=False, repr=False)
    _shares_of: dict[tuple[int, float], tuple[float, ...]] = field(default_factory=dict, init=False, repr=False)

    @property
    def redistribute(self) -> Redistributor:
        """Return what finds the moves between layouts."""
        return self.prices.redistribute

    @property
    def expert_load(self) -> Skew:
        """Return what is assumed of the rows that the busiest device holds at once."""
        return self.held_load if self.other_load is None else self.other_load

    @property
    def held_load(self) -> Skew:
        """Return that which is planned for: the capacity, if devices have one."""
        return Skew(self.problem.expert_capacity) if self.problem.expert_capacity else self.problem.skew

    @property
    def exchanges(self) -> bool:
        """Return whether a reduce-scatter is an all-to-all and a local sum."""
        known = self.prices.collectives
        return known is not None and known.hardware.reduce_scatter_lowering == "all_to_all"

    @cached_property
    def _filled(self) -> tuple[float, float]:
        """Return the average bytes of a bucket of parameters, and of one of gradients."""
        found = [v for v in self.problem.vertices if v.kind == "parameter"]
        trained = [v for v in found if v.node.meta["role"].trainable]
        sizes = ([self.problem.tensor_bytes[v.index, 0] for v in some] for some in (found, trained))
        gathered, reduced = (average_fill(of_some, self.bucket_bytes) for of_some in sizes)
        return gathered, reduced

    def bucket_of(self, producer: int, slots, bytes_: float) -> float:
        """Return the bytes of the bucket in which a tensor that moves `bytes_` global bytes travels, on average; 0 if
        it travels alone."""
        if bytes_ >= self.bucket_bytes or not self.is_bucketed(producer, slots):
            return 0.0
        return self._filled[not is_gathered_ahead(self.problem.vertices[producer])]

    def is_bucketed(self, producer: int, slots) -> bool:
        """Return whether the tensor is a parameter, or its codes, or a gradient: those travel in buckets and share the
        latency of one."""
        return is_gathered_ahead(self.problem.vertices[producer]) or STATE in slots

    def times(self, producer: int, slots, source: Layout) -> int:
        """Return in how many passes of a step a tensor is redistributed."""
        return 1 if self.reduces_once and self._is_reduced(producer, slots, source) else self.micro_batches

    def _is_reduced(self, producer: int, slots, source: Layout) -> bool:
        """Return whether a tensor is a gradient, and its redistribution a sum."""
        is_gradient = self.problem.vertices[producer].phase == "backward" and all(slot == STATE for slot in slots)
        return is_gradient and bool(source.partial) and all(reduction == "sum" for _, reduction in source.partial)

    def steps_of(self, move: Move) -> InSteps | None:
        """Return the steps of a move that goes by tier of links from some size on, None if it goes at once."""
        order = self.problem.mesh.names.index
        return self.prices.hierarchy.get((move.kind, tuple(sorted(move.axes, key=order))))

    def share_between_tiers(self, transfer: Redistribution) -> float:
        """Return the share of a whole bucket that a gather holds after its first tiers of links, or a reduction."""
        steps = [self.steps_of(step.move) for step in transfer.steps]
        inner = [math.prod(map(self.problem.mesh.size, found.inner)) for found in steps if found is not None]
        return 1 / min(inner) if inner else 0.0

    def moved_bytes(self, producer: int, output: int, slots, source: Layout) -> int:
        """Return the global bytes of a tensor in the type in which it is redistributed."""
        bytes_ = self.problem.tensor_bytes[producer, output]
        if self.reduce_dtype is None or not self._is_reduced(producer, slots, source):
            return bytes_
        return min(bytes_, self.problem.vertices[producer].values[output].numel() * self.reduce_dtype.itemsize)

    def cast_seconds(self, producer: int, output: int, source: Layout, target: Layout, bytes_: int) -> float:
        """Return the seconds of the casts before and after a redistribution that moves `bytes_` global bytes."""
        share = bytes_ / max(1, self.problem.tensor_bytes[producer, output])
        if share == 1 or not any(self.redistribute.mesh.size(axis) > 1 for axis, _ in source.partial):
            return 0.0
        vertex = self.problem.vertices[producer]
        is_narrow = output in vertex.casts and operand(vertex.casts[output]).meta["val"].dtype == self.reduce_dtype
        cast = [target] if is_narrow else [source, target]  # of what was made in the type there is none before
        read_and_written = (1 + share) * sum(self.local_bytes(producer, output, layout) for layout in cast)
        return read_and_written / self.redistribute.memory_bytes_per_second

    def seconds(self, source: Layout, target: Layout, bytes_: int, bucket: float) -> float:
        """Return the seconds of one redistribution of a tensor of `bytes_` global bytes, inf if there is none; of its
        share of that of a `bucket`, if that is not 0."""
        if bucket:
            return self.prices.pair(source, target, bucket) * (bytes_ / bucket)
        return self.prices.pair(source, target, bytes_)

    def moved(
        self, producer: int, output: int, source: Layout, target: Layout, bytes_: int, bucket: float
    ) -> tuple[float, tuple[float, ...]]:
        """Return the seconds of one redistribution of a tensor that moves `bytes_` global bytes, casts included, and
        their shares by stream; `bucket` as in `seconds`."""
        seconds = self.seconds(source, target, bytes_, bucket)
        if (producer, output) in self.problem.staying and source != target:
            seconds = np.inf
        split: tuple[float, ...] = (1.0,)
        if 0.0 < seconds < np.inf:
            split = self._shares(source, target, bucket or bytes_)
        cast = self.cast_seconds(producer, output, source, target, bytes_)
        if cast:
            split = tuple(share * seconds / (seconds + cast) for share in split)
            split = (split[0] + cast / (seconds + cast), *split[1:])
        return seconds + cast, split

    def _shares(self, source: Layout, target: Layout, bytes_: float) -> tuple[float, ...]:
        row = int(self.prices.rows((source,), (target,))[0, 0])
        if (row, bytes_) not in self._shares_of:
            seconds = self.prices.split(bytes_)[:, row]
            self._shares_of[row, bytes_] = tuple((seconds / seconds.sum()).tolist())
        return self._shares_of[row, bytes_]

    def table(self, bytes_: float, bucket: float) -> np.ndarray:
        """Return the seconds by stream of every sequence of steps (see TransferPrices) for a tensor of `bytes_` global
        bytes; `bucket` as in `seconds`."""
        if not bucket:
            return self.prices.split(bytes_)
        whole, key = self.prices.split(bucket), (bytes_, bucket)
        found = self._tables.get(key)
        if found is None or found.shape != whole.shape:
            found = self._tables[key] = whole * (bytes_ / bucket)
        return found

    def local_bytes(self, producer: int, output: int, layout: Layout) -> float:
        """Return the bytes on the device that holds most of a tensor in this layout."""
        if (producer, output) in self.problem.never_made:
            return 0.0
        return self.bytes_of(self.problem.vertices[producer].values[output], layout)

    def saved_bytes(self, producer: int, output: int, layout: Layout) -> float:
        """Return the bytes of a tensor on that device if it is saved for the backward, by every micro-batch in flight;
        they share the copies of a parameter, and of kept keys each holds its own."""
        vertex = self.problem.vertices[producer]
        times = 1.0 if vertex.kind == "parameter" else self.in_flight * own_share(vertex.node)
        return self.local_bytes(producer, output, layout) * times

    def bytes_of(self, value: torch.Tensor, layout: Layout) -> float:
        """Return the bytes on the device that holds most of a tensor of any problem in this layout."""
        key = (tuple(value.shape), value.element_size(), layout)
        if key not in self._local:
            local_bytes = largest_local_numel(value.shape, layout, self.problem.mesh) * value.element_size()
            self._local[key] = local_bytes * load_of_rows(layout, self.problem.mesh, self.expert_load)
        return self._local[key]

    def with_load(self, expert_load: Skew) -> Pricer:
        """Return a pricer under which something else is assumed of the rows of experts."""
        return replace(self, other_load=expert_load)

    def saved_for_rounds(self, vertex: Vertex, strategy: Strategy) -> float:
        """Return the bytes that an op keeps for further rounds of rows in the backward, of all micro-batches in
        flight."""
        return self.in_flight * saved_bytes(self.problem, vertex, strategy) if self.other_load is None else 0.0

    def inside_bytes(self, vertex: Vertex, k: int) -> float:
        """Return the bytes that an op allocates while it runs under the strategy `k` of its class."""
        if (key := (vertex.cls, k)) not in self._inside:
            strategy = self.problem.classes[vertex.cls].strategies[k]
            load = load_of(vertex.node, strategy, self.problem.mesh, self.expert_load)
            self._inside[key] = load * inside_bytes(self.problem, vertex, strategy)
            if copies := copies_of(vertex.node, strategy, self.problem.mesh, self.problem.skew.hot):
                self._inside[key] += copies.inside_bytes
            if self.other_load is None:
                self._inside[key] += round_bytes(self.problem, vertex, strategy)
        return self._inside[key]
