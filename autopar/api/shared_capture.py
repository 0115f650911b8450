"""Rank 0 traces a call, or finds it in the cache, and the other ranks take what it captured over."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from ..frontend.call_signature import CallSignature, split_example
from ..frontend.capture_data import capture_data, captured_from
from ..frontend.export import Captured
from ..frontend.fake_parameters import Forms
from ..processes import agree
from ..storage.compile_cache import CompileCache
from ..utils.plain_data import NotPortable

VARIANTS = 4  # of a model and a call, by what the forward reads beyond
_log = logging.getLogger("autopar")


def shared_capture(
    trace: Callable[[], Captured], model: nn.Module, example_inputs, loss_fn: Callable | None, forms: Forms,
    cache: CompileCache, key: str | None,
) -> tuple[Captured, str | None]:  # fmt: skip
    """Return a capture of this rank's model, which `trace` gives too, and a hash of what it computes, None if that
    cannot be told. All ranks call it together; a rank traces for itself where rank 0's capture cannot be sent, or where
    the model, the call or what the forward read is not rank 0's. If tracing fails on a rank, every rank raises. Rank 0
    looks for the `key` in the `cache` first."""

    def taken(text: str, constants: list[torch.Tensor]) -> Captured | None:
        try:
            signature, _ = CallSignature.of(*split_example(example_inputs))
            return captured_from(text, constants, model, loss_fn, forms, signature)
        except NotPortable as reason:
            _log.info("rank %d traces: what was captured before has %s", dist.get_rank(), reason)
            return None

    first: list[Captured] = []

    def sent() -> tuple[str, list[torch.Tensor]] | None:
        keys = [f"{key} {variant}" if key is not None else None for variant in range(VARIANTS)]
        for variant in keys:
            if (found := cache.get(variant)) is None:
                break
            if (captured := taken(*found)) is not None:
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
