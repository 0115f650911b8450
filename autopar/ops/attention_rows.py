"""Attention of a range of the queries, as a device computes it that holds a part of the sequence.

Under a causal mask the queries from number `first` on attend to all keys before `first`, a rectangle, and to those from
there on up to their own place, a triangle. Every kernel serves both. Outputs of two sets of keys join by their
log-sum-exps; given the joint one, gradients by a set of keys need nothing of the other. The blocks take `first`
themselves.

Tensors are those of autopar/ops/attention_forms.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .attention_forms import Form

FormOf = Callable[..., Form]  # of (q, k, v, mask, causal), and `at`, the first query and key if not those of the call
Part = tuple[Tensor, Tensor, Tensor | None, bool]  # keys, values, mask, causal


def forward(
    form_of: FormOf, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, first: int
) -> tuple[Tensor, Tensor]:
    """Return (output, log-sum-exp)."""
    form = form_of(q, k, v, mask, causal)
    if not (causal and first):
        return form.forward(q, k, v, mask, causal, scale)
    if form.takes_first:
        return form.forward(q, k, v, mask, causal, scale, first=first)
    results = [form_of(q, *part).forward(q, *part, scale) for part in parts(q, k, v, mask, first)]
    return results[0] if len(results) == 1 else joined(*results)


def backward(
    form_of: FormOf,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    first: int,
    lse_is_exact: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; those of keys behind the last query are zero. `lse_is_exact`: the mask closes
    keys and adds nothing, so no log-sum-exp is lost in it; that of more keys than are here serves too."""
    form = form_of(q, k, v, mask, causal)
    if form.takes_first:
        arguments = grad, q, k, v, out, lse, mask, causal, scale
        return form.backward(*arguments, first=first, lse_is_exact=lse_is_exact)
    if not (causal and first):
        return form.backward(grad, q, k, v, out, lse, mask, causal, scale)
    dq, dk, dv = zip(
        *(
            form_of(q, *part).backward(grad, q, *part[:2], out, lse, *part[2:], scale)
            for part in parts(q, k, v, mask, first)
        )
    )
    return sum(dq[1:], dq[0]), _all_keys(dk, k), _all_keys(dv, v)


def _all_keys(gradients: Sequence[Tensor], kv: Tensor) -> Tensor:
    """Return the gradient of keys or values from those of the first ones: zero for those that nobody attends to."""
    unseen = kv.shape[2] - sum(x.shape[2] for x in gradients)
    return torch.cat([*gradients, *([kv.new_zeros(*kv.shape[:2], unseen, kv.shape[3])] if unseen else [])], 2)


def parts(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, first: int) -> list[Part]:
    """Return the rectangle and, if keys are left for it, the triangle."""
    before, seen = min(first, k.shape[2]), min(first + q.shape[2], k.shape[2])

    def keys(start: int, count: int, causal: bool) -> Part:
        own = mask if mask is None or mask.shape[-1] == 1 else mask.narrow(-1, start, count)
        return k.narrow(2, start, count), v.narrow(2, start, count), own, causal

    return [keys(0, before, False)] + ([keys(before, seen - before, True)] if seen > before else [])


def joined(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return (output, log-sum-exp) over two sets of keys from those of each; 0 and -inf where both are closed."""
    lse = torch.logaddexp(a[1], b[1])
    finite = lse.masked_fill(lse == float("-inf"), 0.0)
    out = a[0] * (a[1] - finite).exp().unsqueeze(-1) + b[0] * (b[1] - finite).exp().unsqueeze(-1)
    return out.to(a[0].dtype), lse
