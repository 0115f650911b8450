"""The canonical attention and its gradient, one node each, whatever computes them.

Tensors are those of autopar/ops/attention_forms.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from . import attention_cpu, attention_documents, attention_gpu, attention_heads, attention_rows
from .attention_blocks import BLOCKS
from .attention_forms import Form, additive, contiguous, lse_dtype


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
