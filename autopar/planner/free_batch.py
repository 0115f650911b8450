"""The batch as a choice: the one with the most tokens a second, of those that fit.

Batches are the given one times powers of two. Larger ones are tried while they gain, smaller ones if the given one
does not fit or if a larger one gains nothing: more samples hide what a step pays once, such as the reduction of
gradients, until memory demands that something is computed again, or cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from .._torch import tree_flatten, tree_map
from ..errors import InputError, MemoryInfeasibleError
from ..frontend.call_signature import split_example
from ..plans.entries import BatchCandidate
from .spmd.planned import Planned

MOST_STEPS = 10  # up or down
GAIN = 1.005  # times the tokens a second: less is not worth twice the batch


def samples_and_tokens(example_inputs: Any) -> tuple[int, int]:
    """Return the samples of a call and its tokens: the elements of its first integers (samples, places), else as many
    as there are samples. Raise InputError for a call without a tensor that has dims."""
    tensors = [x for x in tree_flatten(split_example(example_inputs))[0] if isinstance(x, torch.Tensor) and x.dim()]
    if not tensors:
        raise InputError("a call without a batch has no other batch", fix="leave tokens_per_second out")
    samples = int(tensors[0].shape[0])
    whole = (x for x in tensors if x.dim() == 2 and not x.is_floating_point() and x.shape[0] == samples)
    return samples, next((x.numel() for x in whole), samples)


def with_samples(example_inputs: Any, samples: int) -> tuple[tuple, dict]:
    """Return `(args, kwargs)` of the same call with so many samples, its own again and again: of every tensor whose
    dim 0 is as long as that of the first one."""
    batch, _ = samples_and_tokens(example_inputs)

    def resized(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.dim() or x.shape[0] != batch:
            return x
        return x[torch.arange(samples, device=x.device) % batch]

    return tree_map(resized, split_example(example_inputs))


def fastest(search: Callable[[int], Planned], samples: int, tokens: int) -> Planned:
    """Return the plan with the most tokens a second, with all `batches` that were tried; `search(n)` plans a step of n
    samples, and `tokens` are those of a step of `samples`. Raise the refusal of the smallest batch if none fits."""
    tried: dict[int, Planned | MemoryInfeasibleError] = {}

    def speed(count: int) -> float:
        if count not in tried:
            try:
                tried[count] = search(count)
            except MemoryInfeasibleError as error:
                tried[count] = error
        found = tried[count]
        return count / found.plan.step_seconds if isinstance(found, Planned) else 0.0

    best = samples
    for _ in range(MOST_STEPS if speed(samples) else 0):
        if speed(2 * best) < GAIN * speed(best):
            break
        best *= 2
    for _ in range(MOST_STEPS if best == samples else 0):
        if best % 2 or speed(best) and speed(best // 2) * GAIN <= speed(best):
            break
        best //= 2
    speed(best)
    found = tried[best]
    if not isinstance(found, Planned):
        raise found
    return with_batches(
        found, tuple(_candidate(count, count * tokens // samples, tried[count]) for count in sorted(tried))
    )


def with_batches(planned: Planned, batches: tuple[BatchCandidate, ...]) -> Planned:
    """Return a finished search with the batches that were tried."""
    if planned.staged is None:
        return replace(planned, batches=batches)
    return replace(planned, staged=replace(planned.staged, plan=replace(planned.staged.plan, batches=batches)))


def _candidate(samples: int, tokens: int, found: Planned | MemoryInfeasibleError) -> BatchCandidate:
    if not isinstance(found, Planned):
        return BatchCandidate(samples, tokens, None, None)
    return BatchCandidate(samples, tokens, found.plan.step_seconds, found.plan.peak_bytes)
