"""The skew of the rows of a mixture over its experts, and the load of the busiest device if some are copied.

Which rows an expert gets is known at run time. A plan assumes a load: rows of the device with most of them over those
of a device on average. With h hot experts copied to all of D devices, their rows stay on the device that has them, and
the load is

    S + D m,    S = p_1 + ... + p_h

where p_1 >= p_2 >= ... are the experts' shares of all rows, and m is the largest share of a device's own experts that
are not hot. All devices are assumed to have rows of the hot experts alike. m is

    of shares that are given, expert by expert: the largest sum over a device's block of experts without the hot ones
    of a load alone: p_(h+1) and, of the other experts of its device, the mean of what is left: (1 - S - p_(h+1)) times
                     (e - 1) / (E - 1), for e of E experts a device

and in the latter case the shares are those of Zipf's law, p_i ~ i^-a, with a such that the load without copies, h = 0,
is what was said. At worst all rows that are not hot are on one device, whose experts then have no more than the hot
ones, while its own rows are hot: min(D e / (e + h), D - 1) + 1, and D without copies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from ..ir.layout import chunk

HALVINGS = 60  # of the interval in which Zipf's exponent is
STEEPEST = 64.0


@dataclass(frozen=True)
class Skew:
    """An assumption on the routing of experts. `load`: of the busiest device without copies, infinite for the worst;
    `shares`: of all rows by expert, instead of it; `hot`: experts of a layer that are copied, of so many `experts`."""

    load: float = 1.0
    shares: tuple[float, ...] = ()
    hot: int = 0
    experts: int = 0

    @property
    def is_even(self) -> bool:
        """Return whether experts are assumed to get equal numbers of rows."""
        return self.load == 1.0 and not self.shares

    @property
    def worst(self) -> Skew:
        """Return the worst routing under the same copies."""
        return replace(self, load=math.inf, shares=())

    def at(self, devices: int) -> float:
        """Return the rows of the busiest device over the mean, if experts are cut over so many devices."""
        return _at(self, devices)[0]

    def sent_at(self, devices: int) -> float:
        """Return the same of the rows of experts that are not hot, which alone are sent."""
        return _at(self, devices)[1]

    def staying(self, devices: int) -> float:
        """Return the share of all rows that hot experts have."""
        load, sent = _at(self, devices)
        return load - sent


@cache
def _at(skew: Skew, devices: int) -> tuple[float, float]:
    """Return the load of all rows, and of those that are sent."""
    hot = min(skew.hot, skew.experts)
    if not hot and not skew.shares:
        load = min(skew.load, float(devices))
        return load, load
    if skew.load == math.inf:
        here = max(1.0, skew.experts / devices)
        sent = min(devices * here / (here + hot), devices - 1.0) if hot < skew.experts else 0.0
        return sent + 1.0, sent
    if skew.shares:
        shares = np.array(skew.shares) / sum(skew.shares)
        order = np.argsort(-shares, kind="stable")
        staying = float(shares[order[:hot]].sum())
        shares[order[:hot]] = 0.0
        most = max(float(shares[slice(*chunk(len(shares), devices, i))].sum()) for i in range(devices))
    else:
        shares = zipf(skew.experts, devices, skew.load)
        staying, most = float(shares[:hot].sum()), _most_of_device(shares, hot, devices)
    return staying + devices * most, devices * most


def _most_of_device(shares: np.ndarray, hot: int, devices: int) -> float:
    """Return the share of the rows that are not hot on the device of the next expert."""
    if hot >= len(shares):
        return 0.0
    here, following = max(1.0, len(shares) / devices), float(shares[hot])
    others = 1.0 - float(shares[:hot].sum()) - following
    return following + max(0.0, others) * (here - 1.0) / max(1, len(shares) - 1)


@cache
def zipf(experts: int, devices: int, load: float) -> np.ndarray:
    """Return the shares of so many experts, the largest first, under which the busiest device has a load."""
    rank = np.log(np.arange(1, experts + 1))
    low, high = 0.0, STEEPEST
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        shares = np.exp(-middle * rank)
        shares /= shares.sum()
        if devices * _most_of_device(shares, 0, devices) < load:
            low = middle
        else:
            high = middle
    return shares
