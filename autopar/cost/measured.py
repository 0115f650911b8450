"""Seconds of a collective from measured points, linear between them in the logarithms of bytes and seconds.

More bytes never take less time: a point above a later one is lowered to it, as other work only ever adds time. Below
the first point the time stays, above the last it grows with the bytes. A group whose size was not measured takes the
curve of the nearest measured size (the logarithms compared), at the bytes that make a device of that group send as
much; a larger group adds the time of the first point for each further round of as many steps in a ring.
"""

from __future__ import annotations

import math

import numpy as np

from ..hardware.profile import Curve, Hardware

# bytes that a device sends in a group of n for each byte that it holds before (autopar/cost/redistribute.py)
SENT = {
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "broadcast": lambda n: 1,
    "send": lambda n: 1,
}


def interpolate(curve: Curve, bytes_: np.ndarray) -> np.ndarray:
    """Return the seconds at any number of bytes."""
    x, y = np.log(curve.bytes_), np.log(np.minimum.accumulate(curve.seconds[::-1])[::-1])
    at = np.log(np.maximum(bytes_, curve.bytes_[0]))
    return np.exp(np.interp(at, x, y) + np.maximum(at - x[-1], 0.0))


def curve_for(hardware: Hardware, kind: str, devices: int, stride: int, span: int) -> Curve | None:
    """Return the measured curve nearest to a group of `devices` that are `stride` ranks apart and reach over `span`
    ranks, None if none was measured over the same tier of links."""
    tier = hardware.tier_index(span)
    known = [c for c in hardware.curves if c.kind == kind and hardware.tier_index(c.span) == tier]

    def distance(curve: Curve) -> tuple[float, float]:
        return abs(math.log(curve.devices / devices)), abs(math.log(curve.stride / stride))

    return min(known, key=distance, default=None)


def seconds(curve: Curve, devices: int, held_bytes: np.ndarray) -> np.ndarray:
    """Return the seconds of the curve's collective in a group of so many devices."""
    if curve.devices == devices:
        return interpolate(curve, held_bytes)
    sent = SENT[curve.kind]
    more_steps = 0.0 if curve.kind == "send" else max(0.0, (devices - 1) / (curve.devices - 1) - 1)
    return interpolate(curve, held_bytes * sent(devices) / sent(curve.devices)) + more_steps * min(curve.seconds)
