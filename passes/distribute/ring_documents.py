"""Messages of ring attention among packed documents: how many rows go where is known at run time alone.

The program has the exchanges that a causal mask or a window asks for, and room for the rows that these open
(autopar/ops/ring_documents.py fills it); its plan counts their bytes, which are the most that may be sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from ...ops import autopar
from ...ops.ring import count
from .ring_messages import RingMessages

aten = torch.ops.aten


@dataclass(frozen=True)
class DocumentMessages(RingMessages):
    """Sends and receives what documents need of it. `reached`: of `autopar::reached_rows`."""

    reached: fx.Node

    def start_keys(self, step: int, own: fx.Node, held: fx.Node | None) -> fx.Node:
        """Start to send and receive keys of a step."""
        first, stop = self.ring.reached(self.place, step)
        held_first = 0 if held is None else self.ring.reached(self.place, step - 1)[0]
        sent = sum(count(self.ring.reached(to, step)) for to in self.ring.keys_to(self.place, step))
        at = step, False, first, stop - first
        return self._exchanged(own, held, held_first, at, sent, f"{self.tensor}_keys_start")

    def start_gradients(self, step: int, rows: fx.Node | None, own: fx.Node) -> fx.Node:
        """Start to send gradients of a step home, and to receive those of the own block."""
        first, stop = self._home(step)
        reached = self.ring.reached(self.place, step)
        at = step, True, first, stop - first
        return self._exchanged(own, rows, reached[0], at, count(reached), f"{self.tensor}_gradients_start")

    def received_gradients(self, started: fx.Node, step: int, own: fx.Node) -> tuple[fx.Node | None, fx.Node, fx.Node]:
        """Wait for gradients of the own block; none are passed on."""
        arrived, mark = self._arrived(started)
        if count(home := self._home(step)):
            own = self._call(aten.add.Tensor, own, self._between_zeros(arrived, home))
        return None, own, mark

    def _home(self, step: int) -> tuple[int, int]:
        """Return the rows of the own block of which gradients are made in a step."""
        return self.ring.reached((self.place + step) % self.ring.size, step)

    def _exchanged(
        self, own: fx.Node, held: fx.Node | None, held_first: int, at: tuple, sent_rows: int, name: str
    ) -> fx.Node:
        """Start an exchange. `at`: the step, whether gradients are sent, the first row that may come and how many may;
        `sent_rows`: that the device sends at most."""
        step, of_gradients, first, expected = at
        held = own if held is None else held
        arguments = own, held, held_first, self.reached, self.place, step, of_gradients, first, expected
        started = self.builder.call(autopar.exchange_reached.default, *arguments, ",".join(self.axes), name=name)
        return self._described(started, own, sent_rows)
