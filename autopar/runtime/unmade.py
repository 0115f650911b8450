"""Outputs that a program leaves out: logits of a loss that is computed in blocks (passes/distribute/tile_loss.py).

Whoever reads one gets it from a second forward, on the tensors of the call, of the same plan with whole logits. All
ranks read it together, as any output that is gathered. What the forward read must not have been written to since. A
gradient for it goes the way of any other output beside a loss (autopar/runtime/step.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import _torch
from .outputs import OF_SHAPE, GlobalTensor, OutputForm, name_of, plain

_AS_IT_IS = OF_SHAPE.union(
    """dtype device layout requires_grad grad_fn is_leaf is_floating_point is_complex is_cuda element_size itemsize
    output_nr _version __hash__ __class__ __dict__ _spec _local_tensor""".split()
)


class UnmadeTensor(GlobalTensor):
    """An output that is made when it is read. `_shown` answers for its form, `_make` gives the output itself."""

    _shown: Tensor
    _make: Callable[[], Tensor]

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, name_of(function)
        if name in OF_SHAPE:
            args, kwargs = _torch.tree_map(_shown, (args, kwargs))
            return function(*args, **kwargs)
        if name in _AS_IT_IS:
            with _torch.without_torch_function():
                return function(*args, **kwargs)
        args, kwargs = _torch.tree_map(made, (args, kwargs))
        return function(*args, **kwargs)

    def full_tensor(self, **options):
        """Make the output and return the whole of it."""
        return _dtensor(self).full_tensor(**options)

    def to_local(self, **options):
        """Make the output and return this rank's part of it."""
        return _dtensor(self).to_local(**options)

    def redistribute(self, *args, **options):
        """Make the output and return it in another layout."""
        return _dtensor(self).redistribute(*args, **options)

    def tolist(self):
        """Make the output and return it as numbers."""
        return plain(made(self)).tolist()

    def numpy(self, **options):
        """Make the output and return it as an array."""
        return plain(made(self)).numpy(**options)

    def __format__(self, form: str) -> str:
        return format(plain(made(self)), form)


def _shown(value: Any) -> Any:
    return value._shown if isinstance(value, UnmadeTensor) else value


def made(value: Any) -> Any:
    """Return the output that an unmade one stands for, made once; anything else as it is."""
    if not isinstance(value, UnmadeTensor):
        return value
    with _torch.without_torch_function():
        known = value.__dict__.get("_made")
        if known is not None and (known.requires_grad or not (torch.is_grad_enabled() and value.requires_grad)):
            return known
    with torch.no_grad():
        found = [value._make() if known is None else known.detach()]
    with _torch.without_torch_function():
        known = value.__dict__["_made"] = _Made.apply(value, found)
    return known


def _dtensor(value: UnmadeTensor) -> Any:
    """Return the made output as a DTensor, which it is unless every rank has all of it."""
    known = made(value)
    return known if isinstance(known, DTensor) else _Spread.apply(known, value._spec)


class _Spread(torch.autograd.Function):
    """A tensor that every rank has as a DTensor."""

    @staticmethod
    def forward(ctx, whole: Tensor, spec: Any) -> Tensor:
        return _torch.as_dtensor(whole, spec)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient, None


class _Made(torch.autograd.Function):
    """Puts what was made in the place of an output. Its gradient is one of the unmade output."""

    @staticmethod
    def forward(ctx, value: Any, found: list[Tensor]) -> Tensor:
        ctx.spec = value._spec
        return found.pop()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        is_spread = isinstance(gradient, DTensor)
        return gradient if is_spread else _torch.as_dtensor(gradient.contiguous(), ctx.spec), None


def unmade(form: OutputForm, local: Tensor, lengths, make: Callable[[], Tensor]) -> Tensor:
    """Return an output of a form that `make` makes when it is read; `local` has its local form and no values."""
    output = cast(UnmadeTensor, _torch.as_dtensor(local, form.spec, UnmadeTensor))
    output._shown, output._make = form.of(local, lengths), make
    return output
