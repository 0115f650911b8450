"""Torch's private interfaces to fake tensors, which have shapes and dtypes but no values, and to the memory that
tensors share.

Written for torch >= 2.11, < 2.16.
"""

from __future__ import annotations

from typing import Any, cast

import torch

aten = torch.ops.aten


def fake_mode() -> Any:
    """Return a mode in which tensors have shapes and dtypes but no storage."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_tensor(mode, shape, stride, offset: int, dtype, device, base: torch.Tensor | None = None) -> torch.Tensor:
    """Return a fake tensor of a mode, made without asking any op; it is a view of `base`, or in memory of its own."""
    from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

    with in_kernel_invocation_manager(mode):
        value = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if base is not None:
            value.set_(base.untyped_storage(), offset, shape, stride)
        return FakeTensor(mode, value, device)


def fake_twin(tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor of the form of another one, in the same memory; of one with open sizes it takes a twentieth
    of the time of `fake_tensor`."""
    from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

    mode, device = cast(FakeTensor, tensor).fake_mode, tensor.device
    with in_kernel_invocation_manager(mode):
        return FakeTensor(mode, aten.detach.default(tensor), device)


def is_fake(tensor: object) -> bool:
    """Return whether a tensor exists only while something is traced."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that is equal for tensors in the same memory, while they live."""
    return tensor.untyped_storage()._cdata


def weak_storage(tensor: torch.Tensor) -> object:
    """Return what keeps the `storage_key` of a tensor from being given to another, and does not keep its memory."""
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())
