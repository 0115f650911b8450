"""Outputs as people use them: a global tensor that is gathered when somebody reads it, and never if nobody does.

With inputs="global" every rank computes the same from the outputs of a call, so an output is what eager torch gives:
any loss, metric, head or `.numpy()` takes it. Until then it is a DTensor in the layout in which the plan left it:
logits beside a loss cost nothing. Gathering is a collective, so what reads an output does so on all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import _torch
from .._torch import tree_flatten, tree_map

# What an output answers without being gathered: its form, its place in autograd, and all that makes it a DTensor.
_AS_IT_IS = frozenset(
    """shape size dim ndim numel nelement dtype device layout requires_grad grad_fn is_leaf is_floating_point is_complex
    is_cuda is_meta is_sparse is_quantized element_size itemsize nbytes output_nr _version __len__ __hash__ names
    is_inference type stride placements device_mesh full_tensor to_local redistribute _local_tensor _spec __class__
    is_contiguous ndimension
    __dict__""".split()
)


class GlobalTensor(DTensor):
    """An output of a compiled model. It is gathered by the first function that reads it, which then has a plain
    tensor."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name == "__get__":  # of an attribute
            name = getattr(function.__self__, "__name__", "")
        if name in _AS_IT_IS or torch.compiler.is_compiling() or _is_with_dtensors(args, kwargs):
            with _torch.without_torch_function():
                return function(*args, **kwargs)
        return function(*tree_map(plain, args), **tree_map(plain, kwargs))


def _is_with_dtensors(args: tuple, kwargs: dict) -> bool:
    """Return whether a user's own DTensors, or parameters, are among the arguments: then an output counts as one of
    them."""
    return any(isinstance(a, DTensor) and not isinstance(a, GlobalTensor) for a in tree_flatten((args, kwargs))[0])


def plain(value: object) -> object:
    """Return the whole tensor of a GlobalTensor, gathered once; anything else as it is."""
    if not isinstance(value, GlobalTensor):
        return value
    with _torch.without_torch_function():
        whole = value.__dict__.get("_whole")
        if whole is None or (torch.is_grad_enabled() and value.requires_grad and not whole.requires_grad):
            whole = value.__dict__["_whole"] = _PlainGradient.apply(value.full_tensor())
    return whole


class _PlainGradient(torch.autograd.Function):
    """The identity, whose gradient is a plain tensor: beside a parameter (`loss + p.square().sum()`) it is a
    DTensor."""

    @staticmethod
    def forward(ctx, whole: Tensor) -> Tensor:
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def output_of(local: Tensor, spec, is_global: bool) -> Tensor:
    """Return an output, given this rank's part of it and its layout (None: the whole of it): with `is_global` the plain
    tensor, or a GlobalTensor if it is not whole; else a DTensor."""
    if spec is None:
        return local.detach()
    if not is_global:
        return _torch.as_dtensor(local, spec)
    if all(placement.is_replicate() for placement in spec.placements):
        return local.detach()
    return _torch.as_dtensor(local, spec, GlobalTensor)
