"""Messages between the devices of a ring: what a device holds goes on to the next one while it computes.

A block is sent before the device works with it and waited for behind that, so two blocks are held. Messages are rows of
all-to-alls, one row a block, all of the same length. All devices of a group call the same ones, also those that neither
send nor receive.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import fx

from ..._torch import c10d
from ...ir.graph import bytes_of
from .emit import Builder, Collective


@dataclass(frozen=True)
class Neighbours:
    """The device at `place` of the `size` that are along `axes`. `kind` and `tensor`: what messages are called (see
    Collective)."""

    builder: Builder
    axes: tuple[str, ...]
    size: int
    place: int
    kind: str
    tensor: str

    def start(self, message: fx.Node, to: int | None, sources: Collection[int], name: str) -> fx.Node:
        """Start to send a message, (1, elements) or (0, elements) if `to` is None, and to take a row from each of
        `sources`. Return what `arrived` waits for."""
        received, sent = ([int(p in places) for p in range(self.size)] for places in (sources, {to}))
        arguments = message, received, sent, ",".join(self.axes)
        started = self.builder.call(c10d.all_to_all_single.default, *arguments, name=name)
        value, phase = message.meta["val"], self.builder.meta.get("phase", "forward")
        sent_bytes = float(bytes_of(value))
        started.meta["collective"] = Collective(self.kind, self.axes, sent_bytes, self.tensor, phase)
        started.meta["tensor_bytes"] = value.shape[1] * value.element_size() * self.size
        return started

    def arrived(self, started: fx.Node, name: str | None = None) -> fx.Node:
        """Return the rows that came, in the order of their senders."""
        return self.builder.call(c10d.wait_tensor.default, started, name=name)
