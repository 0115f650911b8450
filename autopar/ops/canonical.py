"""The canonical ops `autopar::*`: one node each in the graph and the plan, with the forms that sharding needs.

The canonicalize pass writes them into the exported forward graph; autograd then derives a backward of one node for each
gradient. Vocabulary-sharded ops take `offset`, the global index of their first local row: an index outside the local
rows contributes nothing, so the results of all shards add up to the whole (a masked lookup, as Megatron-LM's
vocabulary-parallel embedding and cross-entropy, arXiv 1909.08053). Implementations run below autograd: they call
kernels and formulas only.

Shapes in the docstrings are those of the call, local or global alike. Products of stacks of matrices, batch norm, fake
quantization, quantized weights, 8-bit floats, random numbers, the sums of a cross-entropy and CTC have files of their
own: autopar/ops/matmul.py, grouped.py, batch_norm.py, fake_quant.py, nf4.py, fp8.py, fp8_linear.py, counter_rng.py,
vocab_loss.py, linear_loss.py and ctc.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from . import (  # noqa: F401  (most for their ops, which they register)
    attention_bias,
    attention_cpu,
    attention_documents,
    attention_gpu,
    attention_heads,
    attention_join,
    attention_rows,
    batch_norm,
    counter_rng,
    ctc,
    expert_rows,
    fake_quant,
    fp8,
    fp8_linear,
    gather_by_broadcasts,
    grouped,
    linear_loss,
    matmul,
    nf4,
    token_rows,
    vocab_loss,
)
from .attention_blocks import BLOCKS
from .attention_forms import Form, additive, contiguous, lse_dtype

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


# attention
# -------------------------------------------------------------------------------------------------------------


def _form(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Form:
    if q.is_cuda:
        return attention_gpu.form_of(q, k, v, mask, causal)
    return attention_cpu.CPU if q.is_cpu else BLOCKS


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _seq_major(x: Tensor) -> Tensor:
    """Return the same values stored as (b, s, h, d), which the projection after attention reads without a copy."""
    return contiguous(x.transpose(1, 2)).transpose(1, 2)


@custom_op("autopar::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    first: int = 0,
    head: int = 0,
    group: int = 0,
    documents: Tensor | None = None,
    key_documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute scaled dot-product attention. q is (b, h, s, d), k (b, h_kv, t, d) and v (b, h_kv, t, d_v) with h a
    multiple of h_kv (grouped queries); mask is bool or additive, broadcastable to (b, h, s, t). `first` is the number
    of the first query: under a causal mask it attends to keys 0 to `first`. If `group` is given, so many heads of
    queries read one of keys, and the first one here is number `head`. With `documents` (b, s) and `key_documents`
    (b, t), integers, or one row for all samples, a query attends to the keys whose integer is its own. Returns the
    output (b, h, s, d_v) and the log-sum-exp (b, h, s): 0 and -inf for a query that may attend to no key."""
    arguments = additive(mask, q.dtype), causal, _scale(q, scale), first
    k, v = (attention_heads.read(x, q, head, group) for x in (k, v))
    if documents is None or key_documents is None:
        out, lse = attention_rows.forward(_form, q, k, v, *arguments)
    else:
        out, lse = attention_documents.forward(_form, q, k, v, *arguments, documents, key_documents)
    return _seq_major(out), lse.clone(memory_format=torch.contiguous_format)


@custom_op("autopar::attention_bw", mutates_args=())
def attention_bw(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    first: int = 0,
    head: int = 0,
    group: int = 0,
    documents: Tensor | None = None,
    key_documents: Tensor | None = None,
    of_block: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; those of keys and values are sums over the queries that are here. `of_block`:
    the keys are some of those that the output and the log-sum-exp are over."""
    closes = mask is None or mask.dtype == torch.bool or of_block
    arguments = additive(mask, q.dtype), causal, _scale(q, scale), first, closes
    keys, values = (attention_heads.read(x, q, head, group) for x in (k, v))
    if documents is None or key_documents is None:
        dq, dk, dv = attention_rows.backward(_form, grad, q, keys, values, out, lse, *arguments)
    else:
        dq, dk, dv = attention_documents.backward(
            _form, grad, q, keys, values, out, lse, *arguments, documents, key_documents
        )
    dk, dv = (attention_heads.of_all(d, x, q, head, group) for d, x in ((dk, k), (dv, v)))
    return _seq_major(dq), _seq_major(dk), _seq_major(dv)


def _empty_seq_major(like: Tensor, shape) -> Tensor:
    b, h, s, d = shape
    return like.new_empty(b, s, h, d).transpose(1, 2)


@attention.register_fake
def _(q, k, v, mask, causal, scale, first=0, head=0, group=0, documents=None, key_documents=None):
    return _empty_seq_major(q, (*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=lse_dtype(q.dtype))


@attention_bw.register_fake
def _(grad, q, k, v, *others, **constants):
    return _empty_seq_major(q, q.shape), _empty_seq_major(k, k.shape), _empty_seq_major(v, v.shape)


def _attention_setup(ctx, inputs, output):
    q, k, v, mask, *ctx.constants = inputs[:-2]
    ctx.save_for_backward(q, k, v, *output, mask, *inputs[-2:])


def _attention_backward(ctx, grad, _):
    q, k, v, out, lse, mask, *documents = ctx.saved_tensors
    gradients = attention_bw(grad, q, k, v, out, lse, mask, *ctx.constants, *documents)
    return (*gradients, None, *[None for _ in (*ctx.constants, *documents)])


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
