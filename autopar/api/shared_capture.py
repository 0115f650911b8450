"""Rank 0 traces a call, or finds it in the cache, and the other ranks take what it captured over."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from ..frontend.capture_data import capture_data
from ..frontend.export import Captured
from ..frontend.fake_parameters import Forms
from ..processes import agree
from ..storage.compile_cache import CompileCache
from ..utils.plain_data import NotPortable
from .kept_capture import find, taken_over

_log = logging.getLogger("autopar")


def shared_capture(
    trace: Callable[[], Captured],
    model: nn.Module,
    example_inputs,
    loss_fn: Callable | None,
    forms: Forms,
    cache: CompileCache,
    key: str | None,
) -> tuple[Captured, str | None]:
    """Return a capture of this rank's model, which `trace` gives too, and a hash of what it computes, None if that
    cannot be told. All ranks call it together; a rank traces for itself where rank 0's capture cannot be sent, or where
    the model, the call or what the forward read is not rank 0's. If tracing fails on a rank, every rank raises. Rank 0
    looks for the `key` in the `cache` first."""

    call = model, example_inputs, loss_fn, forms

    def taken(text: str, constants: list[torch.Tensor]) -> Captured | None:
        return taken_over(text, constants, *call)

    first: list[Captured] = []

    def sent() -> tuple[str, list[torch.Tensor]] | None:
        captured, found, variant = find(cache, key, taken)
        if captured is not None:
            first.append(captured)
            return found
        first.append(trace())
        if dist.get_world_size() == 1 and key is None:
            return None
        try:
            found = capture_data(first[0], forms)
        except NotPortable as reason:
            _log.info("every rank traces for itself: the capture of rank 0 has %s", reason)
            return None
        cache.put(variant, *found)
        return found

    def mine() -> tuple[Captured, str | None]:
        found = first[0] if first else taken(*data) if data is not None else None
        if found is None or data is None:
            return found or trace(), None
        return found, hashlib.sha256(data[0].encode()).hexdigest()

    data = agree.from_rank_zero(sent)
    return agree.everywhere(mine)
