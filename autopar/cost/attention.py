"""Seconds of attention on one device, by its shape.

Blocks of 128 queries of a head are handed to the multiprocessors; each goes over its blocks of 128 keys, under a causal
mask those up to its own place. With the constants of a profile (Attention)

    start + max(all pairs of blocks / multiprocessors, lone * pairs of the longest block of queries) * seconds of a pair
          + max(lone, blocks of queries / multiprocessors) * block     backward as much longer as the products

A profile has such constants by kernel. On a GPU "flash" is FlashAttention-2 as torch has it, and "cudnn" serves what
autopar/ops/attention_gpu.py gives to cuDNN; "flash3", which torch does not have, is what inference servers were
measured with. Of devices that share the queries of a causal attention the last ones have most keys to go over: with a
share f of the queries 1 - f / 2 of all pairs, where one device has a half. Of a window its area counts. In zigzag all
devices have half of their pairs, in two calls.

What no kernel of torch does (scores that are capped, weights that are dropped, the gradient of what is added to the
scores) GPUs do in kernels of autopar's own (autopar/ops/attention_fused.py): as long as flash, heads as wide as a power
of two, whose backward makes seven products instead of five, nine with the gradient of what is added; and instructions
for each weight, of which a multiprocessor begins 128 in a clock. They are those of the kernels' machine code for
capability 8.0 and 9.0, one that multiplies integers for two. Nobody has timed these kernels.

Where not even those serve (fp32, CPUs), it runs block by block (autopar/ops/attention_blocks.py): products of a large
product's speed, between which each score goes through memory PASSES times, written or read, and a random number for
each weight.

FlashAttention-2, arXiv 2307.08691, section 3: forward two products a pair, backward five.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..hardware.profile import Attention, Hardware
from ..ops.attention_fused import NARROWEST
from ..ops.attention_gpu import FEWEST_KEYS_CUDNN, WIDEST_CUDNN

BLOCK = 128
FLASH, CUDNN, FLASH3 = "flash", "cudnn", "flash3"
BACKWARD_PRODUCTS = 2.5  # for each of the forward
PASSES = {True: 10, False: 22}
# by direction, of a weight: whether it is dropped, the cap of its score; means of benchmarks/attention_instructions.py
DRAW_INSTRUCTIONS = {True: 23.0, False: 43.0}
CAP_INSTRUCTIONS = {True: 13.0, False: 30.0}
ADDED_INSTRUCTIONS = 5.0  # backward: what is added is read once more
OWN_BACKWARD, OF_ADDED = 7 / 5, 2 / 5  # products, of flash's
PRODUCTS = {True: (1, 1), False: (3, 2)}  # by direction: with the width of queries and keys, with that of values


@dataclass(frozen=True)
class Shape:
    """Attention on one device: `batch` times `heads` of so many queries and keys. `share`: of all queries, those that
    the device has, the last ones. `score_bytes`: of a score, where blocks of them go through memory, 0 in a kernel;
    `draw_seconds`: of the number that says whether its weight is dropped; `window`: as the op has it. `instructions`:
    of a weight, in a kernel of autopar's own, which makes so many times the `products` of flash. Fields may be
    arrays."""

    batch: float | np.ndarray
    heads: float | np.ndarray
    queries: float | np.ndarray
    keys: float | np.ndarray
    key_dim: float | np.ndarray
    value_dim: float | np.ndarray
    causal: bool = True
    share: float | np.ndarray = 1.0
    grouped: bool = False  # several heads of queries read one of keys
    score_bytes: int = 0
    draw_seconds: float = 0.0
    window: int = 0
    instructions: float = 0.0
    products: float = 1.0

    @property
    def reach(self) -> float | np.ndarray:
        """Return the most keys that a query attends to."""
        width = self.window if self.causal else 2 * self.window - 1
        return np.minimum(self.keys, width) if self.window else self.keys

    @property
    def open_share(self) -> float | np.ndarray:
        """Return the share of the pairs of a query and a key that the mask leaves open."""
        if not self.window:
            return 1.0 - self.share / 2 if self.causal else 1.0
        if not self.causal:
            return self.reach / self.keys
        before, window = (1.0 - self.share) * self.keys, np.minimum(self.window, self.keys)  # keys
        first = np.minimum(before, window)
        growing = (window**2 - first**2) / 2  # of queries whose window begins before the first key
        return (growing + (self.keys - np.maximum(before, window)) * window) / (self.share * self.keys**2)

    @property
    def pairs(self) -> float | np.ndarray:
        """Return the pairs of a query and a key that the mask leaves open."""
        return self.batch * self.heads * self.queries * self.keys * self.open_share

    def flops(self, forward: bool) -> float | np.ndarray:
        """Return the FLOPs that count: half of all under a causal mask."""
        with_keys, with_values = PRODUCTS[forward]
        return 2.0 * self.pairs * (with_keys * self.key_dim + with_values * self.value_dim)


def blocked_seconds(
    constants: Attention, multiprocessors: int, peak_flops_per_second: float, shape: Shape, forward: bool = True
):
    """Return the seconds of the kernels of one direction."""
    share = np.interp(shape.key_dim, constants.head_dims, constants.shares)
    speed = peak_flops_per_second * share * (1.0 if forward else constants.backward)
    if not multiprocessors:
        return constants.start_seconds + shape.flops(forward) / speed
    rows, columns = np.ceil(shape.queries / BLOCK), np.ceil(shape.keys / BLOCK)
    blocks = shape.batch * shape.heads * rows
    pairs = blocks * (columns * shape.open_share + 0.5 if shape.causal or shape.window else columns)
    with_keys, with_values = PRODUCTS[forward]
    widths = with_keys * shape.key_dim + with_values * shape.value_dim
    pair_seconds = 2.0 * BLOCK**2 * widths * multiprocessors / speed
    lone, block_seconds = constants.lone_share, constants.block_seconds * constants.width_factor(shape.key_dim)
    longest = np.minimum(columns, np.ceil(shape.reach / BLOCK) + 1) if shape.window else columns
    work = np.maximum(pairs / multiprocessors, lone * longest) * pair_seconds
    ends = np.maximum(lone, blocks / multiprocessors) * block_seconds
    return constants.start_seconds + work + (ends if forward else ends * BACKWARD_PRODUCTS / constants.backward)


def kernel_of(hardware: Hardware, shape: Shape) -> str:
    """Return the kernel that serves attention of a shape without a mask, of those that the profile knows."""
    is_long = shape.keys >= FEWEST_KEYS_CUDNN and max(shape.key_dim, shape.value_dim) <= WIDEST_CUDNN
    return CUDNN if CUDNN in hardware.attention and is_long and not shape.grouped else FLASH


def attention_seconds(hardware: Hardware, peak_flops_per_second: float, shape: Shape, forward: bool) -> float:
    """Return the seconds of one direction by the profile, at the speed of a large product if it says nothing."""
    if shape.score_bytes:
        products = shape.flops(forward) / (peak_flops_per_second * hardware.flops_efficiency)
        of_score = PASSES[forward] * shape.score_bytes / hardware.reached_memory_bytes_per_second + shape.draw_seconds
        return float(products + shape.pairs * of_score)
    beside = 0.0
    if shape.instructions:
        beside = float(shape.pairs * shape.instructions / _instructions_per_second(hardware))
        shape = replace(shape, key_dim=_padded(shape.key_dim), value_dim=_padded(shape.value_dim))
    constants = hardware.attention.get(FLASH if beside else kernel_of(hardware, shape))
    if constants is None:
        seconds = shape.flops(forward) / (peak_flops_per_second * hardware.flops_efficiency)
    else:
        seconds = blocked_seconds(constants, hardware.kernels.multiprocessors, peak_flops_per_second, shape, forward)
    return float(shape.products * seconds + beside)


def own_kernel(forward: bool, drops: bool, caps: bool, adds: bool) -> dict[str, float]:
    """Return what a Shape says of a kernel of autopar's own: of weights that are dropped, scores that are capped, or
    the gradient of what is added to them."""
    instructions = drops * DRAW_INSTRUCTIONS[forward] + caps * CAP_INSTRUCTIONS[forward] + adds * ADDED_INSTRUCTIONS
    return {"instructions": instructions, "products": 1.0 if forward else OWN_BACKWARD + adds * OF_ADDED}


def _instructions_per_second(hardware: Hardware) -> float:
    """Return the instructions of one lane that a device begins in a second: where a profile does not say it, it
    multiplies and adds in fp32 with each."""
    return hardware.kernels.instructions_per_second or hardware.peak_flops_per_second("fp32") / 2


def _padded(width: float | np.ndarray) -> float | np.ndarray:
    """Return the width of heads as autopar's own kernels have it."""
    return np.maximum(NARROWEST, 2.0 ** np.ceil(np.log2(width)))


def zigzag_seconds(hardware: Hardware, peak_flops_per_second: float, shape: Shape, forward: bool) -> float:
    """Return the seconds of one direction of a causal attention whose queries are cut in zigzag, on the first device:
    of the first and of the last of its queries. All devices have as many pairs."""
    half = shape.queries / 2
    first = replace(shape, queries=half, keys=half, share=1.0)
    last = replace(shape, queries=half, share=shape.share / 2)
    return sum(attention_seconds(hardware, peak_flops_per_second, one, forward) for one in (first, last))
