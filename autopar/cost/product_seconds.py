"""Seconds of a matrix product on one device, by its size.

A product (b, m, n, k) is cut into tiles of the output, and its depth perhaps into parts; the multiprocessors take a
tile each, all of them together a wave. With the constants of a profile (Products) the kernel takes

    start + max(waves * (fill + k / parts * step) + parts > 1 ? split + sums of the parts / tile bytes a second : 0,
                bytes of the three matrices / memory's speed)
    step   = max(FLOPs of one step of k / share of the peak, bytes of its two slices / tile bytes a second)
    waves  = b ceil(m / tile rows) ceil(n / tile columns) parts / multiprocessors, at least 1; of a last wave that is
             not full the share `whole_waves` is waited for

and the tile and the number of parts are those that take least. Low precision quantizes its first operand on the way:
m rows and m k elements. Waves: NVIDIA, "Matrix Multiplication Background User's Guide", which also says that rows which
are not whole vectors of 16 bytes are loaded one number at a time. A profile without Products has a ramp instead:
k / (k + half_depth) of the speed, and so for m and n.

That is a kernel alone. Products that run for minutes draw all the power that a device may have, and its clock falls
until they keep to that: a run has `sustained` (Hardware) of the speed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..errors import HardwareError
from ..hardware.profile import Hardware, Products
from .products import Product

TILES = ((256, 128), (128, 256), (128, 128), (64, 256), (64, 128), (128, 64), (64, 64), (128, 32), (32, 128), (16, 128))
PARTS = (1, 2, 3, 4, 6, 8, 16, 32)
LEAST_DEPTH = 128  # of a part
STEP_DEPTH = 64  # k is loaded in slices of so many numbers
MISALIGNED = 0.6  # share of the speed, an estimate; older libraries lost more
VECTOR_BYTES = 16
BLOCK_ROWS, BLOCK_DEPTH = 64, 128  # multiples that blocks of scales need of n and k
SUM_BYTES = 4  # of a number of a part's result

_ROWS, _COLUMNS, _PARTS = (
    np.array(values, float) for values in zip(*((*tile, parts) for tile in TILES for parts in PARTS))
)


def tiled_seconds(
    constants: Products,
    multiprocessors: int,
    peak_flops_per_second: float,
    products: np.ndarray,
    element_bytes: int,
    clock: float = 1.0,
) -> np.ndarray:
    """Return the seconds of `products`, rows of (b, m, n, k), whose operands have so many bytes a number. `clock`: the
    share of their speed that the multiprocessors and their caches have."""
    b, m, n, k = (products[:, i : i + 1].astype(float) for i in range(4))
    many, load = multiprocessors, constants.tile_bytes_per_second * clock
    waves = np.maximum(b * np.ceil(m / _ROWS) * np.ceil(n / _COLUMNS) * _PARTS / many, 1.0)
    waves += constants.whole_waves * (np.ceil(waves) - waves)
    aligned = np.where((n * element_bytes % VECTOR_BYTES > 0) | (k * element_bytes % VECTOR_BYTES > 0), MISALIGNED, 1.0)
    speed = clock * constants.share * peak_flops_per_second * (aligned if element_bytes <= 2 else 1.0)
    step = np.maximum(2 * _ROWS * _COLUMNS * many / speed, (_ROWS + _COLUMNS) * element_bytes * many / load)
    depth = np.ceil(k / _PARTS / STEP_DEPTH) * STEP_DEPTH
    sums = np.where(_PARTS > 1, constants.split_seconds + SUM_BYTES * _PARTS * b * m * n / load, 0.0)
    compute = waves * (constants.fill_seconds + depth * step) + sums
    compute = np.where((_PARTS > 1) & (k / _PARTS < LEAST_DEPTH), np.inf, compute).min(1)
    b, m, n, k = (values[:, 0] for values in (b, m, n, k))
    moved = element_bytes * b * (m * k + k * n + m * n) / constants.memory_bytes_per_second
    quantized = b * m * (constants.row_seconds + k * constants.element_seconds)
    padded = np.where((n % BLOCK_ROWS > 0) | (k % BLOCK_DEPTH > 0), constants.padding_seconds, 0.0)
    result = constants.start_seconds + np.maximum(compute, moved) + quantized
    return np.maximum(constants.least_seconds, result) + padded


def product_seconds(
    hardware: Hardware,
    products: np.ndarray,
    peak_flops_per_second: float,
    element_bytes: int,
    kind: str = "dense",
    clock: float = 1.0,
    quantizes: bool = True,
) -> np.ndarray:
    """Return the seconds of `products`, rows of (b, m, n, k). `element_bytes`: of a number of the operands; `kind`: a
    key of Hardware.products; `clock`: 1 for a kernel alone; `quantizes`: whether low precision quantizes its first
    operand on the way. Raise HardwareError for a kind that the profile does not have."""
    known = hardware.products.get(kind) or (hardware.products.get("dense") if kind == "grouped" else None)
    if known and not quantizes:
        known = replace(known, row_seconds=0.0, element_seconds=0.0)
    if known:
        many = hardware.kernels.multiprocessors
        return tiled_seconds(known, many, peak_flops_per_second, products, element_bytes, clock)
    if kind not in ("dense", "grouped"):
        raise HardwareError(
            f"profile {hardware.name} has no products of kind {kind}", fix=f"add a [products.{kind}] table to it"
        )
    b, m, n, k = products.T
    kernels = hardware.kernels
    halves = (m + kernels.half_rows) * (n + kernels.half_columns) * (k + kernels.half_depth)
    return 2.0 * b * halves / (clock * peak_flops_per_second * hardware.flops_efficiency)


class ProductSeconds:
    """Prices products of a run on one kind of device, at the clock that it sustains, of operands that are quantized
    already where they are in low precision, and remembers them."""

    def __init__(self, hardware: Hardware):
        self.hardware = hardware
        self._known: dict[tuple, float] = {}

    def __call__(self, product: Product, peak_flops_per_second: float, element_bytes: int, kind: str = "dense"):
        """Return the seconds of one product, as `product_seconds` does."""
        key = (product, peak_flops_per_second, element_bytes, kind)
        if key not in self._known:
            clock = self.hardware.sustained
            found = product_seconds(self.hardware, np.array([product], float), *key[1:], clock, quantizes=False)
            self._known[key] = float(found[0])
        return self._known[key]
