"""Autocast around a call: its state, as a plain value, and tracing under it.

A graph is traced on CPU tensors and has every cast of autocast as a node (passes/canonicalize/explicit_casts.py), so
autocast is off while the graph is differentiated and while it runs. What was on when a model was called belongs to the
form of the call, as the shapes do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

DEVICES = ("cpu", "cuda")
State = tuple[tuple[str, torch.dtype], ...]  # device type and lower precision of each autocast that is on


def ambient() -> State:
    """Return the autocast that is on here and now, () if none is."""
    return tuple((d, torch.get_autocast_dtype(d)) for d in DEVICES if torch.is_autocast_enabled(d))


def device_of(model: nn.Module, around: State) -> str:
    """Return the type of device whose autocast a model runs under: "cuda" if CUDA's is on around the call or if a
    parameter is on such a device, else "cpu"."""
    is_cuda = any(device == "cuda" for device, _ in around) or any(p.is_cuda for p in model.parameters())
    return "cuda" if is_cuda else "cpu"


@contextmanager
def entered(state: State) -> Iterator[None]:
    """Inside, autocast is as in `state`, on every device, whatever it is outside."""
    before, wanted = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in DEVICES], dict(state)
    with ExitStack() as stack:
        for device, enabled, dtype in before:
            stack.callback(torch.set_autocast_enabled, device, enabled)
            stack.callback(torch.set_autocast_dtype, device, dtype)
            torch.set_autocast_enabled(device, device in wanted)
            torch.set_autocast_dtype(device, wanted.get(device, dtype))
        yield
