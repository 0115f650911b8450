"""What every model here returns, and the loss that language models share."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from ..errors import ModelError

IGNORED = -100  # the label that torch's cross_entropy leaves out of the mean


@dataclass
class Output:
    """`logits`: the model's result. `loss`: a scalar, None when the call had no labels or target."""

    loss: Tensor | None
    logits: Tensor


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of predicting token s + 1 at position s. logits (B, S, V), labels (B, S) -> scalar.

    The labels are shifted, not the logits: cutting the last position off the logits would copy the largest tensor of the
    model and leave S - 1 positions, which no number of devices divides as S does. The last position has no label.
    """
    shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORED)  # (B, S)
    return F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), ignore_index=IGNORED)  # (B*S, V), (B*S,)


def require_positive(config: object, *names: str) -> None:
    """Raises ModelError unless each named field of the config is a positive integer."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{name}={value!r} is not a positive integer", fix=f"set {name} to 1 or more")


def require_divides(config: object, part: str, whole: str) -> None:
    """Raises ModelError unless field `part` divides field `whole`."""
    a, b = getattr(config, part), getattr(config, whole)
    if b % a:
        near = min((d for d in range(1, b + 1) if b % d == 0), key=lambda d: (abs(d - a), d))
        raise ModelError(f"{part}={a} does not divide {whole}={b}", fix=f"set {part}={near}, or another {whole}")
