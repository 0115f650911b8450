"""Define what every model here returns, and the loss that language models share."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # the label that torch's cross_entropy leaves out of the mean


@dataclass
class Output:
    """`logits`: the model's result. `loss`: a scalar, None when the call had no labels or target."""

    loss: Tensor | None
    logits: Tensor


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of predicting token s + 1 at position s. logits (B, S, V), labels (B, S) -> scalar.

    The labels are shifted, not the logits: cutting the last position off the logits would copy the largest tensor of
    the model and leave S - 1 positions, which no number of devices divides as S does. The last position has no
    label."""
    shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORED)  # (B, S)
    return F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), ignore_index=IGNORED)  # (B*S, V), (B*S,)
