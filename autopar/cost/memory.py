"""Resident bytes of a parameter: master, gradient, optimizer state, and the copy that computes under mixed precision.

With fp32 everything is 4 bytes: AdamW holds parameter, gradient and two moments, 16 bytes a parameter. With bf16 the master,
its gradient and the moments stay fp32 and a 2-byte copy computes, 18 bytes a parameter (Megatron-LM's count, 16 in the ZeRO
paper, arXiv 1910.02054, which keeps the gradient in half precision).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import StrategyError

OPTIMIZER_STATE_BYTES = {"adamw": 8, "adam": 8, "sgd": 0, "sgd_momentum": 4, "none": 0}
COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp64": 8}


@dataclass(frozen=True)
class StateBytes:
    """Bytes for each element of a parameter; gradient and optimizer only if it is trained."""

    master: int
    copy: int
    gradient: int
    optimizer: int

    @staticmethod
    def of(optimizer: str, precision: str) -> StateBytes:
        """Raises StrategyError for an unknown optimizer or precision."""
        if optimizer not in OPTIMIZER_STATE_BYTES:
            raise StrategyError(
                f"no optimizer {optimizer!r} is known", fix=f"use one of {', '.join(sorted(OPTIMIZER_STATE_BYTES))}"
            )
        if precision not in COMPUTE_BYTES:
            raise StrategyError(
                f"no precision {precision!r} is known", fix=f"use one of {', '.join(sorted(COMPUTE_BYTES))}"
            )
        master = 8 if precision == "fp64" else 4
        scale = master // 4
        return StateBytes(
            master, COMPUTE_BYTES[precision] if precision == "bf16" else 0, master,
            OPTIMIZER_STATE_BYTES[optimizer] * scale,
        )  # fmt: skip

    def resident(self, trainable: bool) -> int:
        """Bytes an element takes all through training."""
        if not trainable:
            return self.copy or self.master
        return self.master + self.copy + self.gradient + self.optimizer
