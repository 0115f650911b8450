"""Functions of torch that look at gradients by themselves, and let autopar do so where it knows more of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import utils


def unscale_through(wrap: Callable[[Callable], Callable]) -> None:
    """Let torch.amp.GradScaler, wherever it unscales and checks the gradients of an optimizer, call what `wrap` makes
    of the method that does so: (scaler, optimizer, 1 / scale, a zero, whether float16 may be) -> by device, 1.0 if a
    gradient was not finite."""
    scaler: Any = torch.amp.GradScaler
    scaler._unscale_grads_ = wrap(scaler._unscale_grads_)


def total_norm_through(wrap: Callable[[Callable], Callable]) -> None:
    """Let torch.nn.utils.get_total_norm, which clip_grad_norm_ calls, be what `wrap` makes of it, also for who has
    imported it before: (tensors, norm_type, error_if_nonfinite, foreach) -> norm, without gradients."""
    function: Any = utils.get_total_norm  # a wrapper that turns gradients off around what it keeps as `func`
    inner = dict(zip(function.__code__.co_freevars, function.__closure__))["func"]
    inner.cell_contents = wrap(inner.cell_contents)
