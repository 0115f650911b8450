"""Cross-entropy and negative log-likelihood written in ops that may all be sharded, the vocabulary of a cross-entropy
included.

Classes are in the last dim. What a target contributes, for the log-probabilities l_c of its classes c, weights w_c (1
without weights), its class y and smoothing e of C classes, is

    (1 - e) * -w_y l_y  +  e / C * sum_c -w_c l_c        0 for a target that is `ignore_index`

and a mean divides the sum by that of w_y over the targets that count, as torch.nn.functional.cross_entropy has it. A
target that is no class (eager torch raises on a CPU, and asserts on a GPU) is not refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten
NONE, MEAN = 0, 1  # reductions as ATen numbers them; 2 is a sum


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    reduction: int,
    dtype: torch.dtype,
    weight: Tensor | None = None,
    smoothing: float = 0.0,
    classes: int = 0,
) -> Tensor:
    """Return the cross-entropy in `dtype`: (..., c), (...), weight (c,) -> () or (...). `classes` is c, which only
    smoothing needs."""
    wide = _wide(dtype)
    row_max = aten._to_copy.default(aten.amax.default(aten.detach.default(logits), [-1]), dtype=wide)
    keep = aten.ne.Scalar(target, ignore_index)
    safe = aten.where.ScalarOther(keep, target, 0)
    sums = torch.ops.autopar.vocab_loss.default(logits, safe, row_max, 0)
    log_sum = aten.add.Tensor(aten.log.default(sums[0]), row_max)
    loss = aten.sub.Tensor(log_sum, sums[1])
    share = None
    if weight is not None:
        weight = aten._to_copy.default(weight, dtype=wide)
        share = aten.index.Tensor(weight, [safe])
        loss = aten.mul.Tensor(loss, share)
    if smoothing:
        loss = aten.mul.Tensor(loss, 1 - smoothing)
        loss = aten.add.Tensor(
            loss, aten.mul.Tensor(_of_all(logits, log_sum, weight, wide, classes), smoothing / classes)
        )
    return _reduced(loss, keep, share, reduction, dtype)


def _of_all(logits: Tensor, log_sum: Tensor, weight: Tensor | None, wide: torch.dtype, classes: int) -> Tensor:
    """Return sum_c -w_c l_c = (sum_c w_c) log_sum - sum_c w_c logits_c."""
    scores = aten._to_copy.default(logits, dtype=wide)
    if weight is None:
        return aten.sub.Tensor(aten.mul.Tensor(log_sum, float(classes)), aten.sum.dim_IntList(scores, [-1]))
    weighted = aten.sum.dim_IntList(aten.mul.Tensor(scores, weight), [-1])
    return aten.sub.Tensor(aten.mul.Tensor(log_sum, aten.sum.default(weight)), weighted)


def negative_log_likelihood(
    log_p: Tensor, target: Tensor, ignore_index: int, reduction: int, dtype: torch.dtype, weight: Tensor | None = None
) -> Tensor:
    """Return the negative log-likelihood as `cross_entropy` does, from log-probabilities and without smoothing."""
    keep = aten.ne.Scalar(target, ignore_index)
    safe = aten.where.ScalarOther(keep, target, 0)
    picked = aten.squeeze.dim(aten.gather.default(log_p, -1, aten.unsqueeze.default(safe, -1)), -1)
    loss = aten._to_copy.default(aten.neg.default(picked), dtype=_wide(dtype))
    share = None
    if weight is not None:
        share = aten.index.Tensor(aten._to_copy.default(weight, dtype=_wide(dtype)), [safe])
        loss = aten.mul.Tensor(loss, share)
    return _reduced(loss, keep, share, reduction, dtype)


def _reduced(loss: Tensor, keep: Tensor, share: Tensor | None, reduction: int, dtype: torch.dtype) -> Tensor:
    """Reduce the losses of the targets to keep. `share` is what a target counts in a mean, 1 if None."""
    wide = _wide(dtype)
    loss = aten.where.ScalarOther(keep, loss, 0.0)
    if reduction != NONE:
        loss = aten.sum.default(loss)
    if reduction == MEAN:
        counts = aten._to_copy.default(keep, dtype=wide) if share is None else aten.where.ScalarOther(keep, share, 0.0)
        loss = aten.div.Tensor(loss, aten.sum.default(counts))
    return loss if dtype == wide else aten._to_copy.default(loss, dtype=dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
