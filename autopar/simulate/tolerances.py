"""Bounds on how far apart the numbers of a verified step may be, by the precision in which it computes."""

from __future__ import annotations

# relative: sums in another order differ by some roundings
TOLERANCE = {"fp64": 1e-7, "fp32": 1e-5, "bf16": 3e-2, "fp16": 1e-2}
# errors are taken relative to at least this much of the largest norm: a gradient may be zero but for rounding
FLOOR = {"fp64": 1e-4, "fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}
CAPTURED = 1e-3  # of the captured graph against the model itself, both on one device in the wider type
ROUNDING_FACTOR = 10.0  # a sharded and an unsharded step round differently, by chance: as much as an order of magnitude
