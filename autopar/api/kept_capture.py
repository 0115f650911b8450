"""Take a capture over that an earlier process left in the cache, or trace and leave one."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn

from ..frontend.call_signature import CallSignature, split_example
from ..frontend.capture_data import capture_data, captured_from
from ..frontend.export import Captured
from ..frontend.fake_parameters import Forms
from ..storage.compile_cache import CompileCache
from ..utils.plain_data import NotPortable

VARIANTS = 4  # of a model and a call, by what the forward reads beyond
Data = tuple[str, list[torch.Tensor]]  # of a capture, as the cache keeps it
_log = logging.getLogger("autopar")


def find(
    cache: CompileCache, key: str | None, taken: Callable[[str, list[torch.Tensor]], Captured | None]
) -> tuple[Captured | None, Data | None, str | None]:
    """Return the first capture kept under a key that can be taken over, with its data; or neither, and the key under
    which to keep another."""
    variant = None
    for number in range(VARIANTS):
        variant = f"{key} {number}" if key is not None else None
        if (found := cache.get(variant)) is None:
            break
        if (captured := taken(*found)) is not None:
            return captured, found, variant
    return None, None, variant


def taken_over(
    text: str, constants: list[torch.Tensor], model: nn.Module, example_inputs, loss_fn: Callable | None, forms: Forms
) -> Captured | None:
    """Return the capture of this process's model and call that the data are, None if they are of another one."""
    try:
        signature, _ = CallSignature.of(*split_example(example_inputs))
        return captured_from(text, constants, model, loss_fn, forms, signature)
    except NotPortable as reason:
        _log.info("traced anew: what was captured before has %s", reason)
        return None


def kept_or_traced(
    trace: Callable[[], Captured],
    model: nn.Module,
    example_inputs,
    loss_fn: Callable | None,
    forms: Forms,
    cache: CompileCache,
    key: str | None,
) -> Captured:
    """Return the capture that `trace` gives, from the cache if it is there, and keep it otherwise."""
    call = model, example_inputs, loss_fn, forms
    captured, _, variant = find(cache, key, lambda text, constants: taken_over(text, constants, *call))
    if captured is None:
        captured = trace()
        try:
            if variant is not None:
                cache.put(variant, *capture_data(captured, forms))
        except NotPortable as reason:
            _log.info("the capture was not kept: it has %s", reason)
    return captured
