"""Which parameters are gathered, and which gradients reduced, in one collective, when, and what that holds meanwhile.

As autopar/passes/bucket.py packs them: neighbours over the same axes, in the order of the step, up to `bucket_bytes` of whole
tensors; a gather is made where the first of a bucket is read, a reduction where the last is made. What a collective takes beside
the tensors before and after it, W bytes on the device before a reduction or after a gather, w of them sent by each device:

    packed gather        W + w   the buffer with all members, each of which is copied out of it, and the packed shards
    packed reduction     W       the members packed, which all-reduced gradients stay in: 0
    one alone            W       rows that must be one after the other, if it moves along a dim that is not the first
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..cost.redistribute import Step
from .evaluate import Pricer
from .problem import Problem
from .step_order import StepOrder, Travel


@dataclass(frozen=True)
class Bucket:
    """Travels that are one collective, before the run at `position`, where it takes `bytes_` beside its members."""

    travels: tuple[Travel, ...]
    position: int
    bytes_: float


def buckets_of(problem: Problem, order: StepOrder, pricer: Pricer) -> list[Bucket]:
    """Of all travels of parameters and gradients."""
    found: dict[tuple, list[list[Travel]]] = {}
    filled: dict[tuple, float] = {}
    for travel in sorted((t for t in order.travels if t.transfer.is_hidden), key=lambda t: _moment(problem, t)):
        t, step = travel.transfer, _collective(travel)
        if step is None:
            continue
        value = problem.vertices[t.producer].values[t.output]
        key = (step.move.kind, step.move.axes, value.dtype, travel.phase, _is_gather(problem, travel))
        if key not in found or filled[key] + t.bytes_ > pricer.bucket_bytes:
            found.setdefault(key, []).append([])
            filled[key] = 0.0
        found[key][-1].append(travel)
        filled[key] += t.bytes_
    return [_bucket(problem, pricer, travels) for groups in found.values() for travels in groups]


def beside_bytes(problem: Problem, pricer: Pricer, travels: Iterable[Travel], packed: bool) -> float:
    """What a collective of these travels takes beside their tensors before and after it."""
    total = 0.0
    for travel in travels:
        t, step = travel.transfer, _collective(travel)
        if step is None:
            continue
        value = problem.vertices[t.producer].values[t.output]
        before, after = pricer.bytes_of(value, t.source), pricer.bytes_of(value, t.target)
        if packed and after > before:
            total += after + before
        elif packed:
            total += 0.0 if step.move.kind == "all_reduce" else before
        elif step.move.dim or step.move.to_dim:
            total += max(before, after)
    return total


def _bucket(problem: Problem, pricer: Pricer, travels: list[Travel]) -> Bucket:
    moments = [_moment(problem, t) for t in travels]
    position = min(moments) if _is_gather(problem, travels[0]) else max(moments)
    return Bucket(tuple(travels), position, beside_bytes(problem, pricer, travels, len(travels) > 1))


def _is_gather(problem: Problem, travel: Travel) -> bool:
    return problem.vertices[travel.transfer.producer].kind == "parameter"


def _moment(problem: Problem, travel: Travel) -> int:
    """Before which run the graph makes a travel alone: a gather before its first reader, a reduction behind its producer."""
    return travel.first if _is_gather(problem, travel) else travel.start


def _collective(travel: Travel) -> Step | None:
    """The first step that is not local."""
    return next((s for s in travel.transfer.redistribution.steps if s.move.kind != "slice"), None)
