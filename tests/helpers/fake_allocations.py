"""Count what the body of an op allocates on another device, on fake tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from autopar._torch import fake_mode, tree_flatten
from autopar.utils.live_bytes import LiveBytes


def counted(
    body: Callable, make: Callable[[], list], inside: Callable[[list], int] = lambda arguments: 0
) -> tuple[object, list, LiveBytes]:
    """(results, arguments, count) of a function of fake tensors; what `make` gives is there before. `inside`: bytes
    that the kernels of attention's backward allocate, by the arguments."""
    with fake_mode():
        arguments = make()
        with LiveBytes([a for a in arguments if isinstance(a, torch.Tensor)], inside(arguments)) as count:
            results = body(*arguments)
    return results, arguments, count


def nbytes(values) -> int:
    """Return the bytes of all tensors among these values."""
    return sum(v.numel() * v.element_size() for v in tree_flatten(values)[0] if isinstance(v, torch.Tensor))
