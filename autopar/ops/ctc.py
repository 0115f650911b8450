"""Connectionist temporal classification (Graves et al., ICML 2006) as ops whose sizes do not depend on values.

ATen keeps the log-probabilities of all prefixes for its backward, a tensor as wide as the longest target, which tracing
cannot know. Here the backward computes them again. Samples are independent: they may be cut wherever each of them has
its own row of `targets`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

aten = torch.ops.aten


@custom_op("autopar::ctc", mutates_args=())
def ctc(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    """Return the negative log-likelihood of every sample: (t, n, c), (n, s) or all targets in one row (s,), (n,),
    (n,) -> (n,)."""
    return _forward(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)[0]


@custom_op("autopar::ctc_bw", mutates_args=())
def ctc_bw(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """Return the gradient of `log_probs`: (n,), then as `ctc` -> (t, n, c)."""
    loss, log_alpha = _forward(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)
    return aten._ctc_loss_backward.Tensor(
        grad, log_probs, targets, input_lengths, target_lengths, loss, log_alpha, blank, zero_infinity
    ).contiguous()


def _forward(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity) -> tuple[Tensor, Tensor]:
    return aten._ctc_loss.Tensor(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)


ctc.register_fake(lambda log_probs, *_: log_probs.new_empty(log_probs.shape[1]))
ctc_bw.register_fake(lambda grad, log_probs, *_: log_probs.new_empty(log_probs.shape))


def _setup(ctx, inputs, output):
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad):
    return ctc_bw(grad, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity), None, None, None, None, None


ctc.register_autograd(_backward, setup_context=_setup)
