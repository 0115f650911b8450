"""Price ring attention on the device that has most to do: blocks of keys that travel beside the products.

With n keys and values over P devices a message has n / P of them. Forward P - 1 messages go beside the products of a
block each, backward P - 1 of keys and as many of their gradients, which come in the log-sum-exp's type and of which the
last finds no product beside it. A message and a block's products gain of each other what a
profile says of collectives beside compute. Under a causal mask the last device works on P - 1 whole blocks and half of
its own; in zigzag every device on half of each. A window leaves of all blocks what it reaches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import fx

from ..hardware.schema import Hardware
from ..ir.graph import tensor_arguments, values_of
from ..ir.layout import ZIGZAG, fraction
from ..ir.mesh import Mesh
from ..ops import ATTENTION, autopar
from ..ops.attention_forms import lse_dtype
from ..ops.ring import Ring
from ..rules import Strategy
from ..rules.layers import ring_axes
from ..rules.reading import bound, tensors_by_name
from .attention import Shape, attention_seconds
from .messages import message_seconds, together_seconds


@dataclass(frozen=True)
class RingCost:
    """One attention whose keys go round over `axes`. `key_bytes`: of a block of keys and values; `gradient_bytes`: of
    its gradients, 0 forward; `joined_bytes`: that adding up the blocks' outputs or gradients reads and writes."""

    axes: tuple[str, ...]
    ring: Ring
    key_bytes: float
    gradient_bytes: float
    joined_bytes: float

    @property
    def messages(self) -> int:
        """Return the number of exchanges in which a device takes part."""
        return (self.ring.size - 1) * (2 if self.gradient_bytes else 1)

    @property
    def sent_bytes(self) -> float:
        """Return the bytes that the device sends that sends most."""
        return self.ring.most_sent * (self.key_bytes + self.gradient_bytes)

    def message_seconds(self, bytes_: float, mesh: Mesh, hardware: Hardware) -> float:
        """Return the seconds of one exchange between neighbours."""
        return message_seconds(self.axes, bytes_, mesh, hardware)

    def sent_seconds(self, mesh: Mesh, hardware: Hardware) -> float:
        """Return the seconds of all messages, were nothing beside them."""
        seconds = [self.message_seconds(b, mesh, hardware) for b in (self.key_bytes, self.gradient_bytes)]
        return (self.ring.size - 1) * sum(seconds)

    def _keys_of_others(self, shape: Shape):
        """Return with how many keys of another device's block a query is computed, of a window on average."""
        if not shape.window:
            return shape.keys / len(self.ring.halves)
        reach = replace(shape, keys=shape.keys * self.ring.size).reach
        return (reach - replace(shape, share=1.0).open_share * shape.keys) / (self.ring.size - 1)

    def seconds(
        self, shape: Shape, peak_flops_per_second: float, forward: bool, mesh: Mesh, hardware: Hardware
    ) -> float:
        """Return the seconds of the op. `shape`: of the device's queries and of its own block of keys."""
        other = replace(shape, causal=False, share=1.0, keys=self._keys_of_others(shape), window=0)
        whole = attention_seconds(hardware, peak_flops_per_second, other, forward)
        own = attention_seconds(hardware, peak_flops_per_second, replace(shape, share=1.0), forward)
        sent, gradients = (self.message_seconds(b, mesh, hardware) for b in (self.key_bytes, self.gradient_bytes))
        steps = self.ring.size - 1
        beside = sent + gradients * (steps - 1) / steps
        together = together_seconds(whole, beside, hardware)
        joins = self.joined_bytes / hardware.reached_memory_bytes_per_second
        return own + steps * together + gradients + joins


def ring_of(node: fx.Node, strategy: Strategy, mesh: Mesh) -> RingCost | None:
    """Return what goes round in an op under a strategy; None if nothing does."""
    if node.target not in ATTENTION:
        return None
    axes = tuple(a for a in ring_axes(node, strategy.inputs) if mesh.size(a) > 1)
    if not axes:
        return None
    names, arguments = list(tensors_by_name(node)), tensor_arguments(node)
    own = [names.index(name) for name in ("k", "v")]
    elements = sum(arguments[i].meta["val"].numel() * fraction(strategy.inputs[i], mesh) for i in own)
    value = arguments[own[0]].meta["val"]
    wide = lse_dtype(value.dtype).itemsize
    forward, size = node.target is autopar.attention.default, math.prod(mesh.size(a) for a in axes)
    made = values_of(node)[0].numel() * fraction(strategy.outputs[0], mesh)
    summed = made if forward else made + elements
    ring = Ring(size, bool(bound(node)["causal"]), strategy.inputs[own[0]].parts[2] == ZIGZAG)
    return RingCost(
        axes,
        ring,
        elements * value.element_size(),
        0.0 if forward else elements * wide,
        3.0 * (size - 1) * summed * wide,
    )
