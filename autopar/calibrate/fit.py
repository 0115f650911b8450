"""Numbers that a planner needs, fitted to measurements."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..cost.measured import SENT, interpolate
from ..hardware.profile import Curve

HALVES = (0, 1, 2, 4, 8, 16, 32, 64, 128)
TOGETHER = ("all_reduce", "all_gather", "all_to_all")  # what one latency and one speed are fitted to
LATENCY_SHARE = 0.1  # of a bucket's time


@dataclass(frozen=True)
class Ramp:
    """FLOPs per second of a product of m rows, k depth, n columns: `speed` m / (m + half_rows) n / (n + half_columns)
    k / (k + half_depth). `median_error` is relative."""

    speed: float
    half_rows: float
    half_columns: float
    half_depth: float
    median_error: float


def ramp(products: Sequence[dict], launch_seconds: float) -> Ramp:
    """Find the ramp that is nearest in the logarithm, its halves among HALVES."""
    m, k, n = (np.array([float(p[key]) for p in products]) for key in ("rows", "depth", "columns"))
    seconds = np.array([p["seconds"] for p in products])
    rate = np.log(2 * m * k * n / np.maximum(seconds - launch_seconds, seconds / 2))
    best = None
    for halves in itertools.product(HALVES, repeat=3):
        shape = sum(np.log(size / (size + half)) for size, half in zip((m, n, k), halves))
        speed = np.mean(rate - shape)
        error = rate - shape - speed
        if best is None or error @ error < best[0] - 1e-9:
            best = error @ error, np.exp(speed), halves, np.median(np.abs(np.expm1(error)))
    _, speed, halves, median_error = best
    return Ramp(float(speed), *map(float, halves), float(median_error))


@dataclass(frozen=True)
class Line:
    """seconds = latency_seconds + bytes sent / bytes_per_second. `median_error` is relative."""

    latency_seconds: float
    bytes_per_second: float
    median_error: float

    def residuals(self, curve: Curve) -> list[float]:
        """Return the relative residuals at the points of a curve."""
        sent = np.array(curve.bytes_) * SENT[curve.kind](curve.devices)
        return ((self.latency_seconds + sent / self.bytes_per_second) / np.array(curve.seconds) - 1).tolist()


def line(curves: Sequence[Curve]) -> Line:
    """Fit a line by least squares of the relative error, over what a device sends (autopar/cost/redistribute.py).
    Neither number falls to 0."""
    sent = np.concatenate([np.array(c.bytes_) * SENT[c.kind](c.devices) for c in curves])
    seconds = np.concatenate([np.array(c.seconds) for c in curves])
    design = np.stack([1 / seconds, sent / seconds], axis=1)
    (latency, per_byte), *_ = np.linalg.lstsq(design, np.ones(len(sent)), rcond=None)
    latency, per_byte = max(latency, seconds.min() / 10), max(per_byte, (seconds / sent).min() / 10)
    error = np.median(np.abs((latency + per_byte * sent) / seconds - 1))
    return Line(float(latency), float(1 / per_byte), float(error))


def left_out_error(curves: Sequence[Curve]) -> float:
    """Return the median relative error of points that neighbours predict: how far to trust times between points."""
    errors = []
    for curve in curves:
        for i in range(1, len(curve.bytes_) - 1):
            rest = Curve(
                curve.kind, curve.devices, curve.stride, *(v[:i] + v[i + 1 :] for v in (curve.bytes_, curve.seconds))
            )
            errors.append(abs(float(interpolate(rest, np.array(curve.bytes_[i]))) / curve.seconds[i] - 1))
    return float(np.median(errors)) if errors else 0.0


def bucket_bytes(fitted: Line) -> int:
    """Return the power of two at which latency is about a tenth of the time."""
    wanted = fitted.latency_seconds * fitted.bytes_per_second * (1 / LATENCY_SHARE - 1)
    return 2 ** max(10, round(np.log2(wanted)))
