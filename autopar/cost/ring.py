"""Price ring attention on the device that has most to do: blocks of keys that travel beside the products.

With n keys and values over P devices a message has the n / P of a block, or those of them that a window reaches
(autopar/ops/ring.py). In each step but the first a message of keys goes beside the products of a block; backward also
one of gradients, which come in the log-sum-exp's type and of which the last finds no product beside it. A message and a
block's products gain of each other what a profile says of collectives beside compute. Under a causal mask the last
device works on P - 1 whole blocks and half of its own; in zigzag every device on half of each. A window leaves of all
blocks what it reaches. Documents are not known when a plan is made: what they save is not priced.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from ..hardware.schema import Hardware
from ..ir.graph import tensor_arguments, values_of
from ..ir.layout import fraction
from ..ir.mesh import Mesh
from ..ops import ATTENTION, autopar
from ..ops.attention_forms import lse_dtype
from ..ops.ring import Ring
from ..rules import Strategy
from ..rules.reading import tensors_by_name
from ..rules.rings import KEYS, round_of
from .attention import Shape, attention_seconds
from .messages import message_seconds, together_seconds


@dataclass(frozen=True)
class RingCost:
    """One attention whose keys go round over `axes`. `key_bytes`: of a key and value, in all samples and heads of a
    device; `gradient_bytes`: of their gradients, 0 forward; `joined_bytes`: that adding up the blocks' outputs or
    gradients reads and writes in a step."""

    axes: tuple[str, ...]
    ring: Ring
    key_bytes: float
    gradient_bytes: float
    joined_bytes: float

    @property
    def steps(self) -> tuple[int, ...]:
        """Return the steps behind the first."""
        return self.ring.steps[1:]

    @property
    def messages(self) -> int:
        """Return the number of exchanges in which a device takes part."""
        return len(self.steps) * (2 if self.gradient_bytes else 1)

    @property
    def sent_bytes(self) -> float:
        """Return the bytes that the device sends that sends most."""
        keys, gradients = self.ring.sent_rows(), self.ring.sent_rows(keys=False, gradients=True)
        return max(a * self.key_bytes + b * self.gradient_bytes for a, b in zip(keys, gradients))

    def _message_seconds(self, row_bytes: float, mesh: Mesh, hardware: Hardware) -> list[float]:
        """Return the seconds of each exchange between neighbours, of the longest message."""
        return [message_seconds(self.axes, rows * row_bytes, mesh, hardware) for rows in self.ring.longest]

    def sent_seconds(self, mesh: Mesh, hardware: Hardware) -> float:
        """Return the seconds of all messages, were nothing beside them."""
        return sum(sum(self._message_seconds(b, mesh, hardware)) for b in (self.key_bytes, self.gradient_bytes))

    def _keys_of_others(self, shape: Shape):
        """Return with how many keys of another device's block a query is computed in a step, of a window on average."""
        if not shape.window:
            return shape.keys / len(self.ring.halves)
        reach = replace(shape, keys=shape.keys * self.ring.size).reach
        return (reach - replace(shape, share=1.0).open_share * shape.keys) / len(self.steps)

    def seconds(
        self, shape: Shape, peak_flops_per_second: float, forward: bool, mesh: Mesh, hardware: Hardware
    ) -> float:
        """Return the seconds of the op. `shape`: of the device's queries and of its own block of keys."""
        own = attention_seconds(hardware, peak_flops_per_second, replace(shape, share=1.0), forward)
        if not self.steps:
            return own
        other = replace(shape, causal=False, share=1.0, keys=self._keys_of_others(shape), window=0)
        whole = attention_seconds(hardware, peak_flops_per_second, other, forward)
        sent, gradients = (self._message_seconds(b, mesh, hardware) for b in (self.key_bytes, self.gradient_bytes))
        beside = [a + b for a, b in zip(sent, [0.0, *gradients])]
        together = sum(together_seconds(whole, message, hardware) for message in beside)
        joins = len(self.steps) * self.joined_bytes / hardware.reached_memory_bytes_per_second
        return own + together + gradients[-1] + joins


def ring_of(node: fx.Node, strategy: Strategy, mesh: Mesh) -> RingCost | None:
    """Return what goes round in an op under a strategy; None if nothing does."""
    if node.target not in ATTENTION or (found := round_of(node, strategy.inputs, mesh)) is None:
        return None
    names, arguments = list(tensors_by_name(node)), tensor_arguments(node)
    own = [names.index(name) for name in ("k", "v")]
    elements = sum(arguments[i].meta["val"].numel() * fraction(strategy.inputs[i], mesh) for i in own)
    value = arguments[own[0]].meta["val"]
    row_elements = elements * found.ring.size / value.shape[KEYS]
    wide, forward = lse_dtype(value.dtype).itemsize, node.target is autopar.attention.default
    made = values_of(node)[0].numel() * fraction(strategy.outputs[0], mesh)
    summed = made if forward else made + elements
    return RingCost(
        found.axes,
        found.ring,
        row_elements * value.element_size(),
        0.0 if forward else row_elements * wide,
        3.0 * summed * wide,
    )
