"""Messages of ring attention: rows of keys and values, or of their gradients, go from device to device.

A row is a key and its value, in all samples and heads of a device. All devices of a group call the same all-to-alls,
also those that neither send nor receive; each sends and receives as many rows as autopar/ops/ring.py says. Rows that a
device passes on are the message that it got.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ..._torch import c10d
from ...ir.graph import bytes_of
from ...ops.ring import Ring, count
from .emit import Builder, Collective

aten = torch.ops.aten


@dataclass(frozen=True)
class RingMessages:
    """Sends and receives what the device at `place` needs. `tensor`: what messages are called; `like`: the device's own
    keys and values."""

    builder: Builder
    axes: tuple[str, ...]
    place: int
    ring: Ring
    tensor: str
    like: Sequence[fx.Node]

    def packed(self, parts: Sequence[fx.Node]) -> fx.Node:
        """Return keys and values, or their gradients, (b, h, rows, d) each, as rows (rows, columns)."""
        flat = []
        for x in parts:
            x = self._call(aten.permute.default, x, [2, 0, 1, 3])
            flat.append(self._call(aten.reshape.default, x, [x.meta["val"].shape[0], -1]))
        return self._call(aten.cat.default, flat, 1)

    def unpacked(self, message: fx.Node) -> list[fx.Node]:
        """Return what `packed` was given."""
        found, start = [], 0
        for x, columns in zip(self.like, self._columns):
            b, h, _, d = x.meta["val"].shape
            part = self._call(aten.slice.Tensor, message, 1, start, start + columns)
            part = self._call(aten.reshape.default, part, [message.meta["val"].shape[0], b, h, d])
            found.append(self._call(aten.permute.default, part, [1, 2, 0, 3]))
            start += columns
        return found

    def start_keys(self, step: int, own: fx.Node, held: fx.Node | None) -> fx.Node:
        """Start to send and receive what devices work on in a step. `own`: all rows of the device's own block; `held`:
        those that it works on in the step before."""
        ring, place = self.ring, self.place
        held = own if held is None else held
        sent = {
            to: self._rows(own, ring.reached(to, step)) if ring.block(to, step) == place else held
            for to in ring.keys_to(place, step)
        }
        source = ring.keys_from(place, step)
        received = {} if source is None else {source: count(ring.reached(place, step))}
        return self._start(sent, received, own, f"{self.tensor}_keys_start")

    def received_keys(self, started: fx.Node, step: int) -> tuple[fx.Node | None, fx.Node]:
        """Wait for the rows of a step; return them, None if there are none, and a mark of the exchange."""
        arrived, mark = self._arrived(started)
        return (None if self.ring.keys_from(self.place, step) is None else arrived), mark

    def start_gradients(self, step: int, rows: fx.Node | None, own: fx.Node) -> fx.Node:
        """Start to send and receive gradients behind a step that added to them. `own`: of the own block."""
        ring, place = self.ring, self.place
        to = ring.gradients_to(place, step)
        sent = {} if to is None or rows is None else {to: rows}
        received = {p: count(ring.reached(p, step)) for p in ring.gradients_from(place, step)}
        return self._start(sent, received, own, f"{self.tensor}_gradients_start")

    def received_gradients(self, started: fx.Node, step: int, own: fx.Node) -> tuple[fx.Node | None, fx.Node, fx.Node]:
        """Wait for what was sent behind a step; return the gradients of the rows that are worked on now, None if none
        came, those of the own block with what came home, and a mark of the exchange."""
        arrived, mark = self._arrived(started)
        passed, at = None, 0
        for source in self.ring.gradients_from(self.place, step):
            reached = self.ring.reached(source, step)
            found = self._rows(arrived, (at, at + count(reached)))
            at += count(reached)
            if self.ring.block(source, step) == self.place:
                own = self._call(aten.add.Tensor, own, self._between_zeros(found, reached))
            else:
                passed = found
        return passed, own, mark

    @property
    def _columns(self) -> list[int]:
        """Return the elements of a row by keys and by values."""
        return [math.prod(x.meta["val"].shape) // x.meta["val"].shape[2] for x in self.like]

    def _start(self, sent: Mapping[int, fx.Node], received: Mapping[int, int], like: fx.Node, name: str) -> fx.Node:
        """Start an all-to-all of rows, by the device that they go to or come from; `like` has their type."""
        parts = [sent[to] for to in sorted(sent)]
        if not parts:
            message = self._call(aten.new_empty.default, like, [0, like.meta["val"].shape[1]])
        else:
            message = parts[0] if len(parts) == 1 else self._call(aten.cat.default, parts)
        rows = [sent[p].meta["val"].shape[0] if p in sent else 0 for p in range(self.ring.size)]
        counts = [received.get(p, 0) for p in range(self.ring.size)]
        arguments = message, counts, rows, ",".join(self.axes)
        started = self.builder.call(c10d.all_to_all_single.default, *arguments, name=name)
        return self._described(started, like, sum(rows))

    def _described(self, started: fx.Node, like: fx.Node, sent_rows: int) -> fx.Node:
        """Say of an exchange how many rows the device sends, which are of the type and width of `like`."""
        value, phase = like.meta["val"], self.builder.meta.get("phase", "forward")
        sent_bytes = float(sent_rows * value.shape[1] * value.element_size())
        started.meta["collective"] = Collective("all_to_all", self.axes, sent_bytes, self.tensor, phase)
        started.meta["tensor_bytes"] = bytes_of(value) * self.ring.size
        return started

    def _arrived(self, started: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Wait for an exchange; return what came and a mark of it, which holds no memory."""
        arrived = self.builder.call(c10d.wait_tensor.default, started, name=f"{self.tensor}_wait_tensor")
        return arrived, self._call(aten.new_empty.default, arrived, [0])

    def _rows(self, x: fx.Node, rows: tuple[int, int]) -> fx.Node:
        return x if count(rows) == x.meta["val"].shape[0] else self._call(aten.slice.Tensor, x, 0, *rows)

    def _between_zeros(self, x: fx.Node, rows: tuple[int, int]) -> fx.Node:
        """Return rows of the own block between zeros for the others."""
        missing = self.like[0].meta["val"].shape[2] - rows[1]
        return self._call(aten.constant_pad_nd.default, x, [0, 0, rows[0], missing]) if rows[0] or missing else x

    def _call(self, target, *args) -> fx.Node:
        return self.builder.call(target, *args, name=f"{self.tensor}_{target.overloadpacket.__name__}")
