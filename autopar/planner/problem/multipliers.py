"""Hold the prices of what a search pays for besides seconds: bytes, and communication that runs beside compute.

Both are constraints in truth, and enter as prices (Lagrange multipliers). For any prices the least priced cost, less
what the limits themselves are worth, is a lower bound of every plan that keeps the limits.

Collectives that leave a device through the same card take turns: they are one class of links, which has a stream of its
own; stream 0 computes. With c seconds of compute, b of collectives that it waits for and h of those that run beside it,
by stream, a phase takes at least

    sum(c + b) + drag * sum(h)     what the compute stream does, slower beside a collective
    b[x] + h[x]                    what the cards of a class x carry

and so at least any mean of these, with weights that add up to one: the weight of the first is 1 - sum(links).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

PHASES = ("forward", "backward")


def drag(overlap: float, classes: int) -> float:
    """Return the share of a collective's seconds that compute beside it loses, for a gain of `overlap`: as long a
    computation takes 2 - overlap times as long. Compute stands at most while all classes of links are busy; where
    nothing is gained it always does."""
    return min(1.0 - overlap, 1.0 / max(1, classes)) if overlap else 1.0


@dataclass(frozen=True)
class Prices:
    """`byte_seconds`: of a byte that is held when memory peaks. `saved`: whether activations are priced too, or
    resident bytes alone. `gradients`: whether gradients are held then (1) or not yet made (0). `overlap`: share of a
    second that is gained when communication (parameters gathered, gradients reduced) runs beside compute. `links`: the
    weight of every class of links in the spans of a step: the forward and the backward of most of its `micro_batches`,
    and, if those are several, the forward of the first and the backward of the last, which carry what is moved once a
    step."""

    byte_seconds: float = 0.0
    saved: bool = False
    gradients: float = 1.0
    overlap: float = 0.0
    links: tuple[tuple[float, ...], ...] = ()
    micro_batches: int = 1

    def at(self, point: np.ndarray) -> Prices:
        """Return the prices with the weights of a point of the cutting planes."""
        classes = len(self.links[0]) if self.links else 1
        weights = [float(w) for w in point[:-1]]
        links = tuple(tuple(weights[i : i + classes]) for i in range(0, len(weights), classes))
        return replace(self, links=links)

    def compute(self, phase: str) -> float:
        """Return the weight of a second of the phase's compute."""
        return _weights(self)[0][phase][0] if self.links else 1.0

    def blocking(self, phase: str) -> tuple[float, ...]:
        """Return the weights, by stream, of a second of communication that compute waits for."""
        return _weights(self)[0][phase]

    def hidden(self, phase: str, is_once: bool = False) -> tuple[float, ...]:
        """Return the weights, by stream, of a second of communication that may run beside compute; `is_once`: of what
        is moved in one pass of a step alone."""
        return _weights(self)[1 + is_once][phase]

    def weighted(
        self, seconds: float, split: tuple[float, ...], phase: str, is_hidden: bool, is_once: bool = False
    ) -> float:
        """Return the priced seconds of a redistribution that spends these shares of them on the streams."""
        if not self.links:
            return seconds
        weights = self.hidden(phase, is_once) if is_hidden else self.blocking(phase)
        return seconds * sum(w * share for w, share in zip(weights, split) if share)


def spans_of(micro_batches: int) -> list[tuple[str, float, bool]]:
    """Return the spans of an average pass: the phase, the share of the passes, and whether the span carries what is
    moved once a step."""
    if micro_batches == 1:
        return [(phase, 1.0, True) for phase in PHASES]
    return [
        (phase, share, is_once)
        for share, is_once in ((1 - 1 / micro_batches, False), (1 / micro_batches, True))
        for phase in PHASES
    ]


@lru_cache(256)
def _weights(prices: Prices) -> tuple[dict[str, tuple[float, ...]], ...]:
    """Return by phase the weights by stream of blocking communication, of hidden, and of hidden once a step."""
    streams, loss = 1 + len(prices.links[0]), drag(prices.overlap, len(prices.links[0]))
    blocking, hidden, once = ({phase: np.zeros(streams) for phase in PHASES} for _ in range(3))
    for links, (phase, share, is_once) in zip(prices.links, spans_of(prices.micro_batches)):
        own = np.array([0.0, *links])
        main = 1.0 - own.sum()
        beside = np.where(np.arange(streams) > 0, loss * main, main) + own
        blocking[phase] += share * (main + own)
        hidden[phase] += share * beside
        if is_once:
            once[phase] += beside
    return tuple({phase: tuple(w.tolist()) for phase, w in each.items()} for each in (blocking, hidden, once))
