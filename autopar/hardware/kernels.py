"""Describe the kernels of a profile: how matrix products and attention fill one device.

Every time is seconds, every speed bytes per second; autopar/cost/product_seconds.py and autopar/cost/attention.py say
how the numbers are used.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kernels:
    """The constants that all kernels of a device share.

    `multiprocessors` work on tiles at once; 0 where work is not handed out in tiles (a CPU). There, and where a profile
    has no Products, a product of few rows, columns or little depth reaches half of its speed at `half_rows`,
    `half_columns`, `half_depth`. `functions_per_second`: values of gelu (by tanh) that are computed in a second, 0
    where memory is slower. `instructions_per_second`: of single lanes, that are begun; 0 where it is half of the FLOPs
    in fp32.
    """

    multiprocessors: int = 0
    half_rows: float = 0.0
    half_columns: float = 0.0
    half_depth: float = 0.0
    functions_per_second: float = 0.0
    instructions_per_second: float = 0.0


@dataclass(frozen=True)
class Products:
    """Constants of one kind of matrix product.

    `share`: of the peak, of tiles of endless depth. `start_seconds` once a product, `fill_seconds` once a tile,
    `split_seconds` where the depth is cut into parts. `tile_bytes_per_second`: what tiles load together, from caches.
    `whole_waves`: how much of a last wave that is not full is waited for, 0 to 1. Of low-precision products, which
    quantize their first operand: `row_seconds` and `element_seconds` of that, `least_seconds` of the host's work, which
    runs beside the device's, and `padding_seconds` where an operand is no multiple of its blocks of scales.
    """

    share: float
    start_seconds: float
    fill_seconds: float
    tile_bytes_per_second: float
    memory_bytes_per_second: float
    split_seconds: float = 0.0
    whole_waves: float = 1.0
    row_seconds: float = 0.0
    element_seconds: float = 0.0
    least_seconds: float = 0.0
    padding_seconds: float = 0.0


@dataclass(frozen=True)
class Attention:
    """Constants of one kernel of attention.

    `shares`: of the peak at each of `head_dims`, forward, linear between them; `backward` times that backward.
    `start_seconds` once, `block_seconds` once a block of queries. `cache_seconds`: a token to the power
    `cache_exponent` of its key heads, which kernels of inference servers take to write keys and values to their cache.
    The seconds of a block and of a token are those at a width of 128, and grow with it to the power `width_exponent`.
    `lone_share`: of its seconds, those that a block takes that has a multiprocessor to itself, or is split over some.
    """

    head_dims: tuple[float, ...]
    shares: tuple[float, ...]
    backward: float = 1.0
    start_seconds: float = 0.0
    block_seconds: float = 0.0
    cache_seconds: float = 0.0
    cache_exponent: float = 1.0
    width_exponent: float = 0.0
    lone_share: float = 1.0

    def width_factor(self, head_dim):
        """Return how many times as long a block or a token takes as one of a width of 128."""
        return (head_dim / 128) ** self.width_exponent


@dataclass(frozen=True)
class Experts:
    """Constants of an inference server's experts beside their grouped products: `start_seconds` once, and how often the
    hidden numbers and the width of the experts' inner layer go through memory for each token of each expert."""

    hidden_passes: float = 1.0
    width_passes: float = 1.0
    start_seconds: float = 0.0
