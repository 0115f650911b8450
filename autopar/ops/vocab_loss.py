"""The two sums over the vocabulary that a cross-entropy needs, and their gradient, for a part of the vocabulary or all.

Both go over the logits in chunks of rows, so that no copy of them in fp32 exists: beside its result an op holds one
chunk.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.library import custom_op

aten = torch.ops.aten
FEWEST_NUMEL, MOST_NUMEL, CHUNKS = 2**18, 2**24, 32  # of a chunk; into how many logits are cut, between these sizes


def chunk_rows(rows: int, columns: int) -> int:
    """Return how many rows a chunk of logits (rows, columns) has."""
    numel = min(max(rows * columns // CHUNKS, FEWEST_NUMEL), MOST_NUMEL)
    return max(1, numel // max(1, columns))


@custom_op("autopar::vocab_loss", mutates_args=())
def vocab_loss(logits: Tensor, target: Tensor, row_max: Tensor, offset: int) -> tuple[Tensor, Tensor]:
    """Return the two sums that a cross-entropy needs over the vocabulary: of exp(logits - row_max), and of logits where
    the column plus `offset` is `target`. (..., v), (...), (...) -> (...), (...), both in at least fp32."""
    column, inside = _columns(target, offset, logits.shape[-1])
    picked = logits.gather(-1, column.unsqueeze(-1)).squeeze(-1).to(row_max.dtype) * inside
    rows, tops = _rows(logits), row_max.reshape(-1)
    sums = [_exp(rows, tops, start, end).sum(-1) for start, end in _chunks(rows)]
    total = torch.cat(sums) if sums else torch.zeros_like(tops)
    return total.reshape(row_max.shape), picked


@custom_op("autopar::vocab_loss_bw", mutates_args=())
def vocab_loss_bw(
    grad_sum: Tensor, grad_picked: Tensor, logits: Tensor, target: Tensor, row_max: Tensor, offset: int
) -> Tensor:
    """Return the gradient of the logits: grad_sum * exp(logits - row_max), plus grad_picked at the target's column."""
    column, inside = _columns(target, offset, logits.shape[-1])
    column, added = column.reshape(-1, 1), (grad_picked * inside).reshape(-1, 1)
    rows, tops, factors = _rows(logits), row_max.reshape(-1), grad_sum.reshape(-1, 1)
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    grad_rows = _rows(grad)
    for start, end in _chunks(rows):
        chunk = _exp(rows, tops, start, end).mul_(factors.narrow(0, start, end - start))
        chunk.scatter_add_(-1, column.narrow(0, start, end - start), added.narrow(0, start, end - start))
        aten.copy_(grad_rows.narrow(0, start, end - start), chunk)
        del chunk  # before the next one is made
    return grad


def _columns(target: Tensor, offset: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the column of each target, 0 if it is not among these, and whether it is."""
    column = target - offset
    inside = (column >= 0) & (column < width)
    return torch.where(inside, column, 0), inside


def _rows(logits: Tensor) -> Tensor:
    return logits.reshape(logits.numel() // max(1, logits.shape[-1]), logits.shape[-1])


def _chunks(rows: Tensor) -> Iterator[tuple[int, int]]:
    step = chunk_rows(*rows.shape)
    for start in range(0, rows.shape[0], step):
        yield start, min(start + step, rows.shape[0])


def _exp(rows: Tensor, tops: Tensor, start: int, end: int) -> Tensor:
    """Return exp(logits - row_max) of some rows, in the type of row_max."""
    logits, top = rows.narrow(0, start, end - start), tops.narrow(0, start, end - start).unsqueeze(-1)
    return torch.sub(logits, top).exp_()  # in the wider type, without a copy of the logits in it


@vocab_loss.register_fake
def _(logits, target, row_max, offset):
    return torch.empty_like(row_max), torch.empty_like(row_max)


vocab_loss_bw.register_fake(
    lambda grad_sum, grad_picked, logits, target, row_max, offset: logits.new_empty(logits.shape)
)


def _setup(ctx, inputs, output):
    logits, target, row_max, ctx.offset = inputs
    ctx.save_for_backward(logits, target, row_max)


def _backward(ctx, grad_sum, grad_picked):
    """Return the gradient of the logits. row_max only shifts the exponent; it cancels in log(sum) + row_max, so it gets
    no gradient."""
    return vocab_loss_bw(grad_sum, grad_picked, *ctx.saved_tensors, ctx.offset), None, None, None


vocab_loss.register_autograd(_backward, setup_context=_setup)
