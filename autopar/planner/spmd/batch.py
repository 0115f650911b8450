"""Turn a global batch into micro-batches: what a user says of it, and the fewest that need no recomputation.

A step of K micro-batches holds the activations of one alone, or of all of them where the loss needs all samples before
the first backward (passes/pipeline/tail.py). K is a number, follows from the samples that a
data-parallel replica computes at once (Megatron's micro-batch: K = batch / (samples * data-parallel ways)), or is
looked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ...errors import InputError, MemoryInfeasibleError
from ...frontend.call_signature import CallSignature
from ...frontend.export import Captured
from ...ir.mesh import NOT_DATA, Mesh
from ...passes.pipeline.micro_batch import MicroBatched, micro_batch
from ..problem.recipes import DATA, Restriction
from .plan_options import PlanOptions
from .planned import Planned

AUTO = "auto"
MOST_SEARCHES = 3  # when the number of micro-batches is looked for


def data_ways(mesh: Mesh, strategy: str | None) -> int:
    """Return over how many replicas the batch is spread: along the axes that the strategy gives to the batch; without a
    strategy along all axes but those that are named for something else."""
    roles = Restriction.of(strategy, mesh).roles
    named = DATA in roles.values() or strategy not in (None, AUTO)
    return math.prod(mesh.size(a) for a, role in roles.items() if (role == DATA if named else a not in NOT_DATA))


def micro_batches_of(
    batch: int, mesh: Mesh | None, strategy: str | None, micro_batches: int | None, micro_batch: int | None
) -> int:
    """Return K, from either the number of micro-batches or the samples of one on a replica, 1 without both. Raise
    InputError if samples do not divide the batch or are given before the mesh is known, or if both are given."""
    if micro_batches is not None and micro_batch is not None:
        raise InputError("micro-batches are given both as a number and by their size", fix="leave one out")
    if micro_batch is None:
        return micro_batches or 1
    if mesh is None:
        raise InputError(
            "the samples of a replica say nothing before the mesh is known", fix="give the number of micro-batches"
        )
    ways = data_ways(mesh, strategy)
    if batch % (micro_batch * ways):
        fitting = [b for b in _divisors(batch) if batch % (b * ways) == 0]
        fix = (
            f"use a micro-batch of {_nearest(micro_batch, fitting)}" if fitting else f"use a batch that {ways} divides"
        )
        raise InputError(f"a batch of {batch} is no multiple of {micro_batch} samples on {ways} replicas", fix=fix)
    return batch // (micro_batch * ways)


def of_samples(signature: CallSignature, samples: int) -> tuple[tuple, dict]:
    """Return `(args, kwargs)` of a call like another one, without values, with so many samples: every tensor whose dim
    0 is as long as that of the first one has them there."""
    shapes = [shape for shape in signature.shapes if shape is not None]
    batch = samples_of(signature)
    dtypes = [dtype for dtype in signature.dtypes if dtype is not None]
    cut = [(samples, *shape[1:]) if shape and shape[0] == batch else shape for shape in shapes]
    return signature.rebuild([torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in zip(cut, dtypes)])


def samples_of(signature: CallSignature) -> int:
    """Return the samples of a call."""
    return signature.samples


def in_micro_batches(
    captured: Captured, options: PlanOptions, search: Callable[[Captured, PlanOptions], Planned]
) -> Planned:
    """Return what `search` finds for the graph of one of `options.micro_batches` of a whole batch. Raise
    MicroBatchError if the batch cannot be cut so."""
    micro, own = micro_batch_of(captured, options)
    planned = search(micro.captured if micro else captured, own)
    return replace(planned, captured=captured, micro=micro) if micro else planned


def micro_batch_of(captured: Captured, options: PlanOptions) -> tuple[MicroBatched | None, PlanOptions]:
    """Return a whole batch cut into `options.micro_batches`, None if that is one, and the options of planning the
    graph of one of them. Raise MicroBatchError if the batch cannot be cut so."""
    if options.micro_batches == 1:
        return None, options
    micro = micro_batch(captured, options.micro_batches)
    return micro, options_of_one(micro, options)


def options_of_one(micro: MicroBatched, options: PlanOptions) -> PlanOptions:
    """Return the options of planning the graph of one micro-batch of a step without stages."""
    count, tail, in_flight = micro.micro_batches, micro.tail, micro.in_flight
    return replace(options, micro_batches=count, overlay=micro.overlay, tail=tail, in_flight=in_flight)


def fewest(search: Callable[[int], Planned], batch: int, ways: int = 1) -> Planned:
    """Return the plan with the fewest micro-batches that fits without recomputation, as far as `MOST_SEARCHES` searches
    tell; `search(K)` plans with K of them. How many are needed is estimated from the activations of the plan before,
    which shrink with K. Micro-batches are multiples of `ways`, if the batch is. If no plan fits so, return or raise
    (MemoryInfeasibleError) what the last search did."""
    choices = [k for k in _divisors(batch) if batch % ways or batch // k % ways == 0]
    without: Planned | None = None
    last: Planned | MemoryInfeasibleError | None = None
    count = low = 1
    for _ in range(MOST_SEARCHES):
        try:
            last = search(count)
        except MemoryInfeasibleError as error:
            last = error
        if isinstance(last, Planned) and (last.staged or not last.evaluation.recomputed):
            without = last
            choices = [k for k in choices if k < count]
        else:
            low = count
        left = [k for k in choices if k > low]
        if not left:
            break
        if without is not None:  # a smaller number may do: the one just below is the likeliest
            count = left[-1]
        else:
            count = at_least(left, low * excess(last)) or 1
    if without is not None:
        return without
    if isinstance(last, MemoryInfeasibleError):
        raise last
    return last


def excess(last: Planned | MemoryInfeasibleError | None) -> float:
    """Estimate how many times as large the activations are as the room for them: at least 2, and 4 if no plan fits."""
    if not isinstance(last, Planned):
        return 4.0
    e, limit = last.evaluation, last.solver.limit_bytes
    freed = sum(step.freed_bytes * count for levels in e.recomputed.values() for step, count in levels.values())
    resident = last.problem.reserve_bytes + e.resident_bytes + e.gradient_bytes + e.whole_gradient_bytes
    return max(2.0, (e.saved_bytes + freed) / max(limit - resident, 1.0))


def at_least(counts: Sequence[int], least: float) -> int | None:
    """Return the first of rising numbers that is no less than `least`, else the last one; None if there is none."""
    return next((k for k in counts if k >= least), counts[-1] if counts else None)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _nearest(value: int, known: list[int]) -> str:
    below = [d for d in known if d < value][-1:]
    above = [d for d in known if d > value][:1]
    return " or ".join(map(str, below + above))
