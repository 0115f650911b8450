"""Resident bytes of a parameter: master, gradient, optimizer state, and the copy that computes under mixed precision.

An fp32 parameter takes 4 bytes four times under AdamW: parameter, gradient and two moments, 16 in all; an fp64 one
twice that, a bf16 one half. With precision="bf16" master, gradient and moments stay fp32 and a 2-byte copy computes, 18
bytes a parameter (Megatron-LM's count, 16 in the ZeRO paper, arXiv 1910.02054, which keeps the gradient in half
precision).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import StrategyError

OPTIMIZER_STATES = {"adamw": 2, "adam": 2, "sgd": 0, "sgd_momentum": 1, "none": 0}  # tensors like the parameter


@dataclass(frozen=True)
class StateBytes:
    """Bytes for each element of a parameter; gradient and optimizer only if it is trained."""

    master: int
    copy: int
    gradient: int
    optimizer: int

    @property
    def computing(self) -> int:
        """Return the bytes of an element of the tensor that computes."""
        return self.copy or self.master

    @staticmethod
    def of(optimizer: str, master: int, copy: int) -> StateBytes:
        """Return the bytes for a parameter of `master` bytes an element that computes in a copy of `copy` bytes, 0 if
        in itself. Raise StrategyError for an unknown optimizer."""
        if optimizer not in OPTIMIZER_STATES:
            raise StrategyError(
                f"no optimizer {optimizer!r} is known", fix=f"use one of {', '.join(sorted(OPTIMIZER_STATES))}"
            )
        return StateBytes(master, copy, master, OPTIMIZER_STATES[optimizer] * master)

    def resident(self, trainable: bool) -> int:
        """Return the bytes that an element takes all through training. The copy that computes comes and goes; a
        gradient lives from the backward to the optimizer's step alone."""
        return self.master + (self.optimizer if trainable else 0)
