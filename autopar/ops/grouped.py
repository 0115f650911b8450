"""The canonical products of a mixture of experts: each row has the matrix of its group.

Elsewhere the rows are sorted by group (`_grouped_mm`), so that only all of them together tell which rows a group has,
or there is a copy of its matrix for each row (`bmm`). Here a row comes with its group, in any order: rows are a dim
that may be sharded, and the op sorts those that it gets; or they come sorted by `by_group`, with where each group ends
(passes/distribute/sort_rows.py). Torch's grouped kernel multiplies them where it takes their type, and nobody waits for
the device; elsewhere one group is multiplied after the other.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn.functional import grouped_mm as kernel

KERNEL_BYTES = 16  # what the kernel's rows and columns are aligned to
KERNEL_TYPES = {"cuda": (torch.bfloat16,), "cpu": (torch.bfloat16, torch.float16, torch.float32)}


@custom_op("autopar::by_group", mutates_args=())
def by_group(group: Tensor, groups: int, offset: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return an order of rows by group, those of none of so many groups from `offset` on last, its inverse, and where
    each group ends (groups) in that order."""
    order, ends = _by_group(group, groups, offset)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return order, inverse, ends


@custom_op("autopar::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, weight: Tensor, group: Tensor, offset: int = 0, ends: Tensor | None = None) -> Tensor:
    """Multiply each row of x by the matrix of its group: (r, k), (g, k, n), (r) -> (r, n); zero where there is no such
    group. `offset` is the number of the first group, so that a device may hold a range of them: the results of all add
    up to the whole. `ends`: of groups, where rows come in the order of `by_group`, in which they are returned then."""
    if ends is not None:
        is_full = x.device.type == "cpu" and int(ends[-1]) == len(x)  # a host waits for no other device to know
        return _product(x, weight, ends, is_full)
    order, ends = _by_group(group, weight.shape[0], offset)
    product = _product(x[order], weight, ends)
    return torch.empty_like(product).index_copy_(0, order, product)


def _product(rows: Tensor, weight: Tensor, ends: Tensor, is_full: bool = False) -> Tensor:
    """Return the product of sorted rows; `is_full`: whether all of them are known to have a matrix."""
    if takes(rows) and takes(weight):
        product = kernel(rows, weight, offs=ends)
        if not is_full:
            product.masked_fill_((torch.arange(len(rows), device=rows.device) >= ends[-1]).unsqueeze(1), 0)
        return product
    product = rows.new_zeros(rows.shape[0], weight.shape[2])
    for i, start, end in _ranges(ends):
        torch.mm(rows[start:end], weight[i], out=product[start:end])
    return product


@custom_op("autopar::grouped_mm_dw", mutates_args=())
def grouped_mm_dw(
    x: Tensor, grad: Tensor, group: Tensor, groups: int, offset: int = 0, ends: Tensor | None = None
) -> Tensor:
    """Return x.T @ grad of each of so many groups from `offset` on, over its rows: (r, k), (r, n), (r) -> (g, k, n).
    `ends` as of `grouped_mm`."""
    if ends is None:
        order, ends = _by_group(group, groups, offset)
        x, grad = x[order], grad[order]
    left, right = x.t(), grad
    if takes(left) and takes(right):
        return kernel(left, right, offs=ends)
    dw = x.new_zeros(groups, x.shape[1], grad.shape[1])
    for i, start, end in _ranges(ends):
        torch.mm(left[:, start:end], right[start:end], out=dw[i])
    return dw


def takes(matrices: Tensor) -> bool:
    """Return whether torch's kernel takes an operand: its type, and where its rows or columns begin."""
    aligned = [stride * matrices.element_size() % KERNEL_BYTES == 0 for stride in matrices.stride() if stride != 1]
    return (
        matrices.dtype in KERNEL_TYPES.get(matrices.device.type, ())
        and 1 in matrices.stride()[-2:]
        and matrices.numel() > 0
        and matrices.storage_offset() * matrices.element_size() % KERNEL_BYTES == 0
        and all(aligned)
    )


def _by_group(group: Tensor, groups: int, offset: int) -> tuple[Tensor, Tensor]:
    """Return an order of rows by group, those of none of so many groups from `offset` on last, and where each ends."""
    place = group - offset
    found, order = torch.where((place >= 0) & (place < groups), place, groups).sort(stable=True)
    numbers = torch.arange(groups, device=group.device, dtype=found.dtype)
    return order, torch.searchsorted(found, numbers, right=True, out_int32=True)


def _ranges(ends: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield each group that has rows, with where they start and end."""
    start = 0
    for i, end in enumerate(ends.tolist()):
        if end > start:
            yield i, start, end
        start = end


grouped_mm.register_fake(lambda x, weight, group, offset=0, ends=None: x.new_empty(x.shape[0], weight.shape[2]))
grouped_mm_dw.register_fake(
    lambda x, grad, group, groups, offset=0, ends=None: x.new_empty(groups, x.shape[1], grad.shape[1])
)


@by_group.register_fake
def _(group, groups, offset):
    order = group.new_empty(group.shape, dtype=torch.int64)
    return order, torch.empty_like(order), group.new_empty(groups, dtype=torch.int32)


def _backward(ctx, grad):
    x, weight, group = ctx.saved_tensors
    dx = grouped_mm(grad, weight.transpose(1, 2), group, ctx.offset) if ctx.needs_input_grad[0] else None
    if not ctx.needs_input_grad[1]:
        return dx, None, None, None, None
    is_transposed = weight.stride(1) < weight.stride(2)  # then the gradient is made so, and nobody has to copy it
    pair = (grad, x) if is_transposed else (x, grad)
    dw = grouped_mm_dw(*pair, group, weight.shape[0], ctx.offset)
    return dx, dw.transpose(1, 2) if is_transposed else dw, None, None, None


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.offset, ends = inputs
    assert ends is None  # what is differentiated is not sorted yet
    ctx.save_for_backward(*tensors)


grouped_mm.register_autograd(_backward, setup_context=_save)
