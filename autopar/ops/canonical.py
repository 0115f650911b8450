"""The canonical ops `autopar::*`: one node each in the graph and the plan, with the forms that sharding needs.

The canonicalize pass writes them into the exported forward graph; autograd then derives a backward of one node for each
gradient. Vocabulary-sharded ops take `offset`, the global index of their first local row: an index outside the local
rows contributes nothing, so the results of all shards add up to the whole (a masked lookup, as Megatron-LM's
vocabulary-parallel embedding and cross-entropy, arXiv 1909.08053). Implementations run below autograd: they call
kernels and formulas only.

Shapes in the docstrings are those of the call, local or global alike. Attention, products of stacks of matrices, batch
norm, fake quantization, quantized weights, 8-bit floats, random numbers, the sums of a cross-entropy and CTC have files
of their own: autopar/ops/attention.py, matmul.py, grouped.py, batch_norm.py, fake_quant.py, nf4.py, fp8.py,
fp8_linear.py, counter_rng.py, vocab_loss.py, linear_loss.py, row_pieces.py, query_pieces.py and ctc.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from . import (  # noqa: F401  (most for their ops, which they register)
    attention,
    attention_bias,
    attention_join,
    batch_norm,
    capped_rows,
    counter_rng,
    ctc,
    expert_rows,
    fake_quant,
    fp8,
    fp8_linear,
    grouped,
    host_copies,
    hot_experts,
    kept_keys,
    linear_loss,
    matmul,
    nf4,
    on_gloo,
    packed_linear,
    query_pieces,
    ring_documents,
    row_pieces,
    row_rounds,
    rows_in_place,
    token_rows,
    vocab_loss,
)

# linear
# ----------------------------------------------------------------------------------------------------------------


@custom_op("autopar::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x by the transposed weight: (..., i), (o, i) -> (..., o)."""
    return torch.matmul(x, weight.t())


@custom_op("autopar::linear_dx", mutates_args=())
def linear_dx(grad: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of the input: (..., o), (o, i) -> (..., i)."""
    return torch.matmul(grad, weight)


@custom_op("autopar::linear_dw", mutates_args=())
def linear_dw(grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of the weight: (..., o), (..., i) -> (o, i)."""
    return grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


def _check_multiplied(one: int, other: int) -> None:
    if one != other:
        raise RuntimeError(f"a dim of {one} is multiplied with one of {other}")


@linear.register_fake
def _(x, weight):
    _check_multiplied(x.shape[-1], weight.shape[1])
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@linear_dx.register_fake
def _(grad, weight):
    _check_multiplied(grad.shape[-1], weight.shape[0])
    return grad.new_empty(*grad.shape[:-1], weight.shape[1])


linear_dw.register_fake(lambda grad, x: grad.new_empty(grad.shape[-1], x.shape[-1]))


def _linear_backward(ctx, grad):
    x, weight = ctx.saved_tensors
    dx = linear_dx(grad, weight) if ctx.needs_input_grad[0] else None
    dw = linear_dw(grad, x) if ctx.needs_input_grad[1] else None
    return dx, dw


linear.register_autograd(_linear_backward, setup_context=matmul.save_factors)


# embedding
# -------------------------------------------------------------------------------------------------------------


@custom_op("autopar::embedding", mutates_args=())
def embedding(weight: Tensor, index: Tensor, padding_idx: int, offset: int) -> Tensor:
    """Return rows `index - offset` of weight (v, h), zero where outside: (v, h), (...) -> (..., h)."""
    row = index - offset
    inside = (row >= 0) & (row < weight.shape[0])
    return weight[torch.where(inside, row, 0)] * inside.unsqueeze(-1)


@custom_op("autopar::embedding_dw", mutates_args=())
def embedding_dw(grad: Tensor, index: Tensor, padding_idx: int, offset: int, rows: int) -> Tensor:
    """Return the gradient of `rows` rows of the weight from `offset` on: (..., h), (...) -> (rows, h). Rows at
    `padding_idx` get none."""
    row = (index - offset).reshape(-1)
    inside = (row >= 0) & (row < rows) & (index.reshape(-1) != padding_idx)
    update = grad.reshape(-1, grad.shape[-1]) * inside.unsqueeze(-1)
    return grad.new_zeros(rows, grad.shape[-1]).index_add_(0, torch.where(inside, row, 0), update)


embedding.register_fake(lambda weight, index, padding_idx, offset: weight.new_empty(*index.shape, weight.shape[1]))
embedding_dw.register_fake(lambda grad, index, padding_idx, offset, rows: grad.new_empty(rows, grad.shape[-1]))


def _embedding_setup(ctx, inputs, output):
    weight, index, ctx.padding_idx, ctx.offset = inputs
    ctx.rows = weight.shape[0]
    ctx.save_for_backward(index)


def _embedding_backward(ctx, grad):
    return embedding_dw(grad, ctx.saved_tensors[0], ctx.padding_idx, ctx.offset, ctx.rows), None, None, None


embedding.register_autograd(_embedding_backward, setup_context=_embedding_setup)
