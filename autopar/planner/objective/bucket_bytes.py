"""Count the bytes of the buckets in which parameters are gathered and gradients reduced, at every moment of a step."""

from __future__ import annotations

import numpy as np

from ..problem.problem import Problem
from ..problem.weight_codes import is_gathered_ahead
from .evaluate import Evaluation
from .pricer import Pricer
from .step_order import StepOrder

GATHERED, BUCKETS = "gathered parameters", "collective buffers"


def bucket_bytes(problem: Problem, pricer: Pricer, evaluation: Evaluation, order: StepOrder) -> dict[str, np.ndarray]:
    """Return for each run the bytes of the buffers in which parameters are gathered (GATHERED), and of those in which
    gradients are reduced beside them (BUCKETS): a bucket, or all that is still to be gathered in this phase or was
    made, if that is less.

    Beside a bucket of gathered parameters is the part of it that was sent, what its first tiers of links brought, and,
    where gathers run ahead (passes/distribute/overlap.py), the next one. Beside a packed bucket of gradients is what
    waited for it and is more than the shards that stay. A reduce-scatter that is an all-to-all receives as much as it
    sends, and both stay until the next bucket is packed; of a native one by tier what its first tier gave stays."""
    count = len(order.runs)
    received, sent, made, shards, all_reduced = (np.zeros(count + 1) for _ in range(5))
    on_its_way = 0.0
    shares: dict[int, float] = {}  # between tiers of links, by redistribution, which many transfers have in common
    for travel in order.travels:
        t = travel.transfer
        is_before = t.phase == "forward" and t.times < pricer.micro_batches  # of the first pass, with little else held
        if not t.is_hidden or is_before:
            continue
        value = problem.vertices[t.producer].values[t.output]
        before, after = (pricer.bytes_of(value, layout) * t.copies for layout in (t.source, t.target))
        if (between := shares.get(id(t.redistribution))) is None:
            between = shares[id(t.redistribution)] = pricer.share_between_tiers(t.redistribution)
        if is_gathered_ahead(problem.vertices[t.producer]):
            received[travel.first] += after
            sent[travel.first] += before + after * between
        else:
            made[travel.start], shards[travel.start] = made[travel.start] + before, shards[travel.start] + after
            all_reduced[travel.start] += before if before == after else 0.0
            on_its_way += before * between
    is_backward = np.array([run.phase == "backward" for run in order.runs], bool)
    gathered, bucket = np.zeros(count), pricer.bucket_bytes
    for phase in (is_backward, ~is_backward):
        total = np.where(phase, received[:-1], 0.0)
        share = 1 + np.where(phase, sent[:-1], 0.0).sum() / max(total.sum(), 1.0)
        left = np.cumsum(total[::-1])[::-1]
        gathered += np.where(phase, np.minimum(left, bucket * (2 if evaluation.overlap else 1)) * share, 0.0)
    by_then, beyond = np.cumsum(made[:-1]), 1 - min(shards.sum() / max(made.sum(), 1.0), 1.0)
    reduced = np.minimum(by_then, bucket) * (1 + beyond)
    written = np.cumsum(all_reduced[:-1])
    reduced = np.maximum(reduced, np.where(written > 0, np.minimum(all_reduced.sum() - written, bucket), 0.0))
    if pricer.exchanges:
        reduced += np.clip(by_then - bucket, 0.0, bucket) * beyond
    else:  # a bucket is packed where none is gathered
        reduced *= 1 + on_its_way / max(made.sum(), 1.0)
        reduced = np.maximum(reduced - gathered, 0.0)
    return {GATHERED: gathered, BUCKETS: np.where(is_backward, reduced, 0.0)}
