"""Price a parameter on the host, with its gradient and its optimizer's state: copies, and a step by the host.

ZeRO-Offload's exchange (Ren et al., arXiv 2101.06840, section 4): a pass copies the shard to the device in the type
that it computes in, and the reduced gradient back; the optimizer steps on the host, where it reads and writes memory.
For e elements of a shard, with bytes an element as in autopar/cost/memory.py:

    copies a pass       e * (computing + gradient) / link
    optimizer a step    sweeps * e * (gradient + 2 * (master + optimizer)) / host memory
"""

from __future__ import annotations

from dataclasses import dataclass

from ..hardware.profile import Host
from .memory import StateBytes


@dataclass(frozen=True)
class HostCost:
    """Seconds and bytes of shards on the host, of a device's share of it. A step has `micro_batches`. Optimizers of
    autopar's own table are taken to be fused, one sweep over their tensors, and nothing to hide behind anything."""

    host: Host
    micro_batches: int = 1

    def copy_seconds(self, elements: float, state: StateBytes, trainable: bool) -> float:
        """Return the seconds of a pass to copy shards to the device and, of what is trained, the gradients back."""
        moved = state.computing + (state.gradient if trainable else 0)
        return elements * moved / self.host.link_bytes_per_second

    def optimizer_seconds(self, elements: float, state: StateBytes, trainable: bool) -> float:
        """Return the seconds of a step for the optimizer on the host, 0 for what is not trained."""
        return elements * state.updated(trainable) / self.host.memory_bytes_per_second

    def pass_seconds(self, elements: float, state: StateBytes, trainable: bool) -> float:
        """Return the seconds of a pass, with its part of the optimizer's step."""
        step = self.optimizer_seconds(elements, state, trainable)
        return self.copy_seconds(elements, state, trainable) + step / self.micro_batches
