"""Read the state of torch around a call: autocast, whether gradients are recorded, the default type."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from ..frontend import autocast


class Ambient(NamedTuple):
    """`casts`: the autocast that is on; `gradients`: whether they are recorded; `dtype`: of float tensors that name
    none."""

    casts: autocast.State
    gradients: bool
    dtype: torch.dtype

    @staticmethod
    def now() -> Ambient:
        """Return what holds here and now."""
        return Ambient(autocast.ambient(), torch.is_grad_enabled(), torch.get_default_dtype())

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make this hold inside, whatever holds outside."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with autocast.entered(self.casts), torch.set_grad_enabled(self.gradients):
                yield
        finally:
            torch.set_default_dtype(before)

    def text(self, trains: bool) -> str:
        """Return what differs from the default, as `, no_grad, autocast cpu bfloat16`, or nothing. `no_grad` is said
        only if the model `trains`."""
        words = ["no_grad"] if trains and not self.gradients else []
        words += [f"autocast {device} {str(dtype).removeprefix('torch.')}" for device, dtype in self.casts]
        return "".join(f", {word}" for word in words)
