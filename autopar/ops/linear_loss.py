"""The sums of a cross-entropy over the vocabulary, and its gradients, straight from the last linear layer's arguments.

The logits are made in blocks of some rows and some of the vocabulary, and none of them are kept: the backward makes
each block again. Beside its results an op holds one block, and the backward of 16-bit numbers a sum in fp32 for some
rows: at most 1.2 times the bytes of the weight. A block of logits is rounded as the linear layer rounds it, so the
numbers are those of the layer followed by autopar/ops/vocab_loss.py, but for the order of sums.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.library import custom_op

aten = torch.ops.aten
MOST_ROWS, FEWEST_ROWS = 2**12, 2**8
MOST_NUMEL, FEWEST_NUMEL = 2**24, 2**16  # of a block of logits


def block_shape(rows: int, columns: int, hidden: int) -> tuple[int, int]:
    """Return how many rows and columns a block of logits (rows, columns) has, of a weight (columns, hidden)."""
    high = min(rows, max(FEWEST_ROWS, min(MOST_ROWS, columns // 4)))
    numel = max(FEWEST_NUMEL, min(MOST_NUMEL, columns * hidden // 8))
    return max(1, high), max(1, min(columns, numel // max(1, high)))


def summed_bytes(rows: int, columns: int, hidden: int, item: int) -> float:
    """Return the bytes that the backward reads and writes to add up what blocks of logits (rows, columns) give, which
    whole logits need not: of the gradient of x once for each block of columns, of the weight's once for each of rows.
    `item`: the bytes of an element."""
    high, wide = block_shape(rows, columns, hidden)
    a_number = 2 * item if item > 2 else 2 * item + 8
    of_rows = rows * hidden * a_number * (-(-columns // wide) - 1)
    return float(of_rows + columns * hidden * 2 * item * (-(-rows // max(1, high)) - 1))


@custom_op("autopar::linear_loss", mutates_args=())
def linear_loss(x: Tensor, weight: Tensor, target: Tensor, offset: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for logits = x @ weight.t(), their maximum over the columns that are here, the sum of
    exp(logits - maximum), and the logit of the column `target - offset`, 0 if that is not here. x is (..., h), weight
    (v, h); the results have the shape of `target`, which has one number a row. The maximum has the type of the logits,
    the others are in at least fp32."""
    rows, flat = _rows(x), target.reshape(-1)
    wide = _wide(x.dtype)
    lowest = torch.finfo(x.dtype).min  # not -inf: it is subtracted from logits that may be
    top = torch.full_like(flat, lowest, dtype=x.dtype)
    total, picked = (torch.zeros_like(flat, dtype=wide) for _ in range(2))
    high, width = block_shape(rows.shape[0], *weight.shape)
    for start, end in _cuts(rows.shape[0], high):
        here, own, highest, sums, found = (_cut(t, start, end) for t in (rows, flat, top, total, picked))
        for left, right in _cuts(weight.shape[0], width):
            logits = here @ _cut(weight, left, right).t()
            column, inside = _columns(own - offset, left, right)
            found.add_(logits.gather(-1, column).squeeze(-1).to(wide) * inside)
            higher = torch.maximum(highest, logits.amax(-1))
            sums.mul_(torch.sub(highest.to(wide), higher).exp_()).add_(_exp(logits, higher.to(wide)).sum(-1))
            aten.copy_(highest, higher)
            del logits
    return top.view(target.shape), total.view(target.shape), picked.view(target.shape)


@custom_op("autopar::linear_loss_bw", mutates_args=())
def linear_loss_bw(
    grad_sum: Tensor, grad_picked: Tensor, x: Tensor, weight: Tensor, target: Tensor, row_max: Tensor, offset: int
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the weight, where that of the logits is grad_sum * exp(logits - row_max), plus
    grad_picked at the target's column."""
    rows, flat = _rows(x), target.reshape(-1)
    given = flat, *(t.reshape(-1) for t in (grad_sum, grad_picked, row_max))
    dx = torch.zeros_like(rows, memory_format=torch.contiguous_format)
    dw = torch.zeros_like(weight, memory_format=torch.contiguous_format)
    is_wide = x.dtype == _wide(x.dtype)
    high, width = block_shape(rows.shape[0], *weight.shape)
    for start, end in _cuts(rows.shape[0], high):
        here, own, factor, added, top = (_cut(t, start, end) for t in (rows, *given))
        of_rows = _cut(dx, start, end)
        total = of_rows if is_wide else torch.zeros_like(of_rows, dtype=torch.float32)
        for left, right in _cuts(weight.shape[0], width):
            part = _cut(weight, left, right)
            grad = here @ part.t()
            column, inside = _columns(own - offset, left, right)
            exact = _exp(grad, top).mul_(factor.unsqueeze(-1))
            exact.scatter_add_(-1, column, (added * inside).unsqueeze(-1))
            aten.copy_(grad, exact)
            del exact
            _cut(dw, left, right).addmm_(grad.t(), here)
            total.addmm_(grad, part) if is_wide else total.add_(grad @ part)
            del grad
        if not is_wide:
            aten.copy_(of_rows, total)
        del total
    return dx.view(x.shape), dw


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _rows(x: Tensor) -> Tensor:
    return x.reshape(x.numel() // max(1, x.shape[-1]), x.shape[-1])


def _cut(x: Tensor, start: int, end: int) -> Tensor:
    return x.narrow(0, start, end - start)


def _cuts(size: int, step: int) -> Iterator[tuple[int, int]]:
    for start in range(0, size, step):
        yield start, min(start + step, size)


def _columns(column: Tensor, left: int, right: int) -> tuple[Tensor, Tensor]:
    """Return the place of each column in a block from `left` to `right`, 0 if it is not there, and whether it is."""
    inside = (column >= left) & (column < right)
    return torch.where(inside, column - left, 0).unsqueeze(-1), inside


def _exp(logits: Tensor, tops: Tensor) -> Tensor:
    """Return exp(logits - tops) in the type of the tops, without a copy of the logits in it."""
    return torch.sub(logits, tops.unsqueeze(-1)).exp_()


@linear_loss.register_fake
def _(x, weight, target, offset):
    wide = _wide(x.dtype)
    return tuple(target.new_empty(target.shape, dtype=dtype) for dtype in (x.dtype, wide, wide))


@linear_loss_bw.register_fake
def _(grad_sum, grad_picked, x, weight, target, row_max, offset):
    return x.new_empty(x.shape), weight.new_empty(weight.shape)
