"""The canonical ops `autopar::*`: one node each in the graph and the plan, with the forms that sharding needs.

The canonicalize pass writes them into the exported forward graph; autograd then derives a backward of one node for each
gradient. Vocabulary-sharded ops take `offset`, the global index of their first local row: an index outside the local
rows contributes nothing, so the results of all shards add up to the whole (a masked lookup, as Megatron-LM's
vocabulary-parallel embedding and cross-entropy, arXiv 1909.08053). Implementations run below autograd: they call
kernels and formulas only.

Shapes in the docstrings are those of the call, local or global alike. Products of stacks of matrices, batch norm, fake
quantization, quantized weights, random numbers and CTC have files of their own: autopar/ops/matmul.py,
batch_norm.py, fake_quant.py, nf4.py, counter_rng.py and ctc.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from . import batch_norm, counter_rng, ctc, expert_rows, fake_quant, matmul, nf4  # noqa: F401  (registers theirs)
from .attention_forms import additive, by_formula, by_formula_backward, by_kernel, by_kernel_backward, lse_dtype

aten = torch.ops.aten


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


linear.register_fake(lambda x, weight: x.new_empty(*x.shape[:-1], weight.shape[0]))
linear_dx.register_fake(lambda grad, weight: grad.new_empty(*grad.shape[:-1], weight.shape[1]))
linear_dw.register_fake(lambda grad, x: grad.new_empty(grad.shape[-1], x.shape[-1]))


def _linear_backward(ctx, grad):
    x, weight = ctx.saved_tensors
    dx = linear_dx(grad, weight) if ctx.needs_input_grad[0] else None
    dw = linear_dw(grad, x) if ctx.needs_input_grad[1] else None
    return dx, dw


linear.register_autograd(_linear_backward, setup_context=matmul.save_factors)


# attention
# -------------------------------------------------------------------------------------------------------------


def _repeat_heads(q: Tensor, kv: Tensor) -> Tensor:
    repeat = q.shape[1] // kv.shape[1]
    return _rows(kv if repeat == 1 else kv.repeat_interleave(repeat, 1))


def _rows(x: Tensor) -> Tensor:
    """Return the same values with adjacent elements in the last dim: the CPU kernel reads them so without checking."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _sum_repeats(grad: Tensor, kv: Tensor) -> Tensor:
    repeat = grad.shape[1] // kv.shape[1]
    return grad if repeat == 1 else grad.unflatten(1, (kv.shape[1], repeat)).sum(2)


def _seq_major(x: Tensor) -> Tensor:
    """Return the same values stored as (b, s, h, d), which the projection after attention reads without a copy."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@custom_op("autopar::attention", mutates_args=())
def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Compute scaled dot-product attention. q is (b, h, s, d), k (b, h_kv, t, d) and v (b, h_kv, t, d_v) with h a
    multiple of h_kv (grouped queries); mask is bool or additive, broadcastable to (b, h, s, t). Returns the output
    (b, h, s, d_v) and the log-sum-exp (b, h, s): 0 and -inf for a query that may attend to no key."""
    q, k, v, mask = _rows(q), _repeat_heads(q, k), _repeat_heads(q, v), additive(mask, q.dtype)
    out, lse = (by_formula if q.is_cuda else by_kernel)(q, k, v, mask, causal, scale)
    return _seq_major(out), lse.clone(memory_format=torch.contiguous_format)


@custom_op("autopar::attention_bw", mutates_args=())
def attention_bw(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v."""
    grad, q, out = _rows(grad), _rows(q), _rows(out)
    full_k, full_v, mask = _repeat_heads(q, k), _repeat_heads(q, v), additive(mask, q.dtype)
    if q.is_cuda:
        dq, dk, dv = by_formula_backward(grad, q, full_k, full_v, mask, causal, scale)
    else:
        dq, dk, dv = by_kernel_backward(grad, q, full_k, full_v, out, lse, mask, causal, scale)
    return _seq_major(dq), _seq_major(_sum_repeats(dk, k)), _seq_major(_sum_repeats(dv, v))


def _empty_seq_major(like: Tensor, shape) -> Tensor:
    b, h, s, d = shape
    return like.new_empty(b, s, h, d).transpose(1, 2)


@attention.register_fake
def _(q, k, v, mask, causal, scale):
    return _empty_seq_major(q, (*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=lse_dtype(q.dtype))


@attention_bw.register_fake
def _(grad, q, k, v, out, lse, mask, causal, scale):
    return _empty_seq_major(q, q.shape), _empty_seq_major(k, k.shape), _empty_seq_major(v, v.shape)


def _attention_setup(ctx, inputs, output):
    q, k, v, mask, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, mask)


def _attention_backward(ctx, grad, _):
    q, k, v, out, lse, mask = ctx.saved_tensors
    return (*attention_bw(grad, q, k, v, out, lse, mask, ctx.causal, ctx.scale), None, None, None)


attention.register_autograd(_attention_backward, setup_context=_attention_setup)


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


# cross-entropy
# ---------------------------------------------------------------------------------------------------------


@custom_op("autopar::vocab_loss", mutates_args=())
def vocab_loss(logits: Tensor, target: Tensor, row_max: Tensor, offset: int) -> tuple[Tensor, Tensor]:
    """Return the two sums that a cross-entropy needs over the vocabulary: of exp(logits - row_max), and of logits where
    the column plus `offset` is `target`. (..., v), (...), (...) -> (...), (...), both in at least fp32."""
    shifted = logits.to(row_max.dtype) - row_max.unsqueeze(-1)
    column = target - offset
    inside = (column >= 0) & (column < logits.shape[-1])
    picked = logits.gather(-1, torch.where(inside, column, 0).unsqueeze(-1)).squeeze(-1)
    return shifted.exp_().sum(-1), picked.to(row_max.dtype) * inside


@custom_op("autopar::vocab_loss_bw", mutates_args=())
def vocab_loss_bw(
    grad_sum: Tensor, grad_picked: Tensor, logits: Tensor, target: Tensor, row_max: Tensor, offset: int
) -> Tensor:
    """Return the gradient of the logits: grad_sum * exp(logits - row_max), plus grad_picked at the target's column."""
    column = target - offset
    inside = (column >= 0) & (column < logits.shape[-1])
    grad = (logits.to(row_max.dtype) - row_max.unsqueeze(-1)).exp_().mul_(grad_sum.unsqueeze(-1))
    grad.scatter_add_(-1, torch.where(inside, column, 0).unsqueeze(-1), (grad_picked * inside).unsqueeze(-1))
    return grad.to(logits.dtype)


@vocab_loss.register_fake
def _(logits, target, row_max, offset):
    return torch.empty_like(row_max), torch.empty_like(row_max)


vocab_loss_bw.register_fake(
    lambda grad_sum, grad_picked, logits, target, row_max, offset: logits.new_empty(logits.shape)
)


def _vocab_loss_setup(ctx, inputs, output):
    logits, target, row_max, ctx.offset = inputs
    ctx.save_for_backward(logits, target, row_max)


def _vocab_loss_backward(ctx, grad_sum, grad_picked):
    """Return the gradient of the logits. row_max only shifts the exponent; it cancels in log(sum) + row_max, so it gets
    no gradient."""
    return vocab_loss_bw(grad_sum, grad_picked, *ctx.saved_tensors, ctx.offset), None, None, None


vocab_loss.register_autograd(_vocab_loss_backward, setup_context=_vocab_loss_setup)
