"""CUDA's autocast on CPU tensors, for as long as a model is traced.

Models are traced on the CPU and autocast does other things there than on CUDA: CUDA sums and norms in float32. A model
reads the types that come of it. So what the dispatcher does on CUDA, as passes/canonicalize/dispatched.py tells, is
done by the CPU's autocast kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from ..._torch.regions import autocast_ops, kernels_in_place_of, no_autocast
from ...frontend.autocast import State, entered
from .dispatched import Recorder, Way, map_leaves, way_of


@contextmanager
def traced_as(device: str, around: State) -> Iterator[None]:
    """Make the CPU's autocast do inside what that of `device` does, also in regions that name `device`; `around` is
    on."""
    if device == "cpu":
        with entered(around):
            yield
        return
    known: dict[tuple, Way] = {}
    kernels = {op: _kernel(op, device, known) for op in autocast_ops(device) | autocast_ops("cpu")}
    with ExitStack() as stack:
        stack.enter_context(kernels_in_place_of("cpu", kernels))
        stack.enter_context(_named_cpu(device))
        stack.enter_context(entered((*around, *(("cpu", dtype) for d, dtype in around if d == device))))
        yield


def _kernel(op, device: str, known: dict[tuple, Way]):
    def run(*args, **kwargs):
        dtype = torch.get_autocast_dtype("cpu")
        with no_autocast():
            key = (op, dtype, str(map_leaves((args, kwargs), _trait)))
            if key not in known:
                known[key] = way_of(op, args, kwargs, dtype, device)
            return _on_the_way(known[key], op, args, kwargs, dtype, device)

    return run


def _on_the_way(way: Way, op, args, kwargs, dtype: torch.dtype, device: str):
    if way.is_taken_apart:
        recorder = Recorder(device)
        _, result = recorder.run(op, args, kwargs, dtype)
        return recorder.plain(result)
    casts = iter(way.casts)

    def cast(value):
        if not isinstance(value, torch.Tensor):
            return value
        to = next(casts)
        return value if to is None else value.to(to)

    args, kwargs = map_leaves((args, kwargs), cast)
    return op(*args, **(kwargs if way.dtype is None else {**kwargs, "dtype": way.dtype}))


def _trait(value: object) -> object:
    return (value.dtype, value.dim()) if isinstance(value, torch.Tensor) else value


@contextmanager
def _named_cpu(device: str) -> Iterator[None]:
    """Make `torch.autocast(device)` mean that of the CPU inside."""
    before = torch.autocast.__init__

    def init(region, device_type, dtype=None, enabled=True, cache_enabled=None):
        if torch.device(device_type).type == device:
            dtype, device_type = torch.get_autocast_dtype(device) if dtype is None else dtype, "cpu"
        before(region, device_type, dtype, enabled, cache_enabled)

    torch.autocast.__init__ = init
    try:
        yield
    finally:
        torch.autocast.__init__ = before
