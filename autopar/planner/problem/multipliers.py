"""What a search pays for besides seconds: bytes, and communication that runs beside compute.

Both are constraints in truth, and enter as prices (Lagrange multipliers). For any prices the least priced cost, less
what the limits themselves are worth, is a lower bound of every plan that keeps the limits.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Prices:
    """`byte_seconds`: of a byte that is held when memory peaks. `saved`: whether activations are priced too, or
    resident bytes alone. `gradients`: whether gradients are held then (1) or not yet made (0). `hidden_...`: by phase
    the weight, from 0 to 1, of communication that may hide behind compute (parameters gathered, gradients reduced).
    `overlap`: share of a second that is gained when such communication runs beside compute.

    With c seconds of compute, h hidden ones and a gain g a phase takes c + h - g min(c, h). For any weight w from 1 - g
    to 1 that is at least (2 - g - w) c + w h, and with the best w no more."""

    byte_seconds: float = 0.0
    saved: bool = False
    gradients: float = 1.0
    hidden_forward: float = 1.0
    hidden_backward: float = 1.0
    overlap: float = 0.0

    def hidden(self, phase: str) -> float:
        """Return the weight of a second of communication that may hide behind the phase's compute."""
        return self.hidden_backward if phase == "backward" else self.hidden_forward

    def compute(self, phase: str) -> float:
        """Return the weight of a second of the phase's compute."""
        return 2.0 - self.overlap - self.hidden(phase) if self.overlap else 1.0
