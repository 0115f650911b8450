"""Trace what Python code of a forward does to tensors past torch's tracing.

`p.data` is `p.detach()`, `p.data = value` a write into `p`, and `torch.inference_mode` a stretch without gradients,
whose tensors no later op may save for a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._torch.regions import switches_grad
from ..errors import CaptureError


@contextmanager
def traced_idioms() -> Iterator[None]:
    """Inside, torch's tracing sees these idioms, if it began outside."""
    inference, idioms = torch.inference_mode, _Idioms()
    before = inference.__enter__, inference.__exit__
    inference.__enter__ = lambda region: idioms.enter(before[0], region)
    inference.__exit__ = lambda region, *error: idioms.leave(before[1], region, *error)
    try:
        with idioms:
            yield
    finally:
        inference.__enter__, inference.__exit__ = before


class _Idioms(TorchFunctionMode):
    """Reads and writes of the attribute `data`, and gradients that are switched on inside of an inference mode, which
    stay off."""

    def __init__(self):
        super().__init__()
        self.outer: list[tuple[bool, bool]] = []  # (inference, gradients) around every region that is open
        self.inference = False

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function == Tensor.data.__get__:
            return args[0].detach()
        if function == Tensor.data.__set__:
            return _write(*args)
        if self.inference and switches_grad(function) and args[0]:
            return None
        return function(*args, **(kwargs or {}))

    def enter(self, enter: Callable, region: torch.inference_mode) -> None:
        """Enter an inference mode, where gradients are off, or an `inference_mode(False)`, where they are on. `enter`
        is torch's own, of which a trace keeps nothing but what it refuses."""
        self.outer.append((self.inference, torch.is_grad_enabled()))
        self.inference = region.mode
        enter(region)
        torch.set_grad_enabled(not region.mode)

    def leave(self, leave: Callable, region: torch.inference_mode, *error) -> None:
        """Leave the innermost inference mode as torch's own `leave` does, and restore what was on around it."""
        leave(region, *error)
        self.inference, gradients = self.outer.pop()
        torch.set_grad_enabled(gradients)


def _write(tensor: Tensor, value: Tensor) -> None:
    if (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
        raise CaptureError(
            f"a tensor {tuple(tensor.shape)} of {tensor.dtype} gets data {tuple(value.shape)} of {value.dtype}",
            fix="keep shape and type of a parameter or buffer during a call",
        )
    with torch.no_grad():
        tensor.detach().copy_(value)
