"""Price the optimizer's update of a parameter on its device: it goes through memory, and computes next to nothing.

For e elements of a shard, with bytes an element as in autopar/cost/memory.py:

    a step    sweeps * e * (gradient + 2 * (master + optimizer)) / memory

read once and, but for the gradient, written once: 28 bytes an element for AdamW in fp32. State that is kept in a
narrow type is widened first and rounded afterwards, each of which reads and writes it: 52 bytes for AdamW in fp32 with
state in bf16.
"""

from __future__ import annotations

from dataclasses import dataclass

from .memory import StateBytes


@dataclass(frozen=True)
class UpdateCost:
    """Seconds of shards that a device reads and writes so many bytes a second of. A step has `micro_batches`."""

    memory_bytes_per_second: float
    micro_batches: int = 1

    def pass_seconds(self, elements: float, state: StateBytes, trainable: bool) -> float:
        """Return a pass's part of the update, 0 for what is not trained."""
        return elements * state.updated(trainable) / self.memory_bytes_per_second / self.micro_batches
