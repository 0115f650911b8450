"""Rank 0 traces a call, and the other ranks take what it captured over."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from ..frontend.call_signature import CallSignature, split_example
from ..frontend.capture_data import capture_data, captured_from
from ..frontend.export import Captured
from ..frontend.fake_parameters import Forms
from ..utils.plain_data import NotPortable
from . import agree

_log = logging.getLogger("autopar")


def shared_capture(
    trace: Callable[[], Captured], model: nn.Module, example_inputs, loss_fn: Callable | None, forms: Forms
) -> Captured:
    """Return a capture of this rank's model, which `trace` gives too. All ranks call it together; a rank traces for
    itself where rank 0's capture cannot be sent, or where the model, the call or what the forward read is not rank
    0's. If tracing fails on a rank, every rank raises."""
    if dist.get_world_size() == 1:
        return trace()
    first: list[Captured] = []

    def sent() -> tuple[str, list[torch.Tensor]] | None:
        first.append(trace())
        try:
            return capture_data(first[0])
        except NotPortable as reason:
            _log.info("every rank traces for itself: the capture of rank 0 has %s", reason)
            return None

    data = agree.from_rank_zero(sent)

    def taken() -> Captured:
        if first:
            return first[0]
        if data is not None:
            try:
                signature, _ = CallSignature.of(*split_example(example_inputs))
                return captured_from(*data, model, loss_fn, forms, signature)
            except NotPortable as reason:
                _log.info("rank %d traces for itself: it has %s", dist.get_rank(), reason)
        return trace()

    return agree.everywhere(taken)
