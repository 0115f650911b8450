"""Weights in 4 or 8 bits with a scale a block, and the op that gives them back: `autopar::dequantize`.

QLoRA (Dettmers et al., arXiv 2305.14314, section 3) divides every block of a weight by its largest absolute value and
rounds to the 16 numbers of a code book: NF4 has quantiles of the normal distribution, FP4 the values of bitsandbytes'
e2m1 floats. Two codes share a byte, the first in its upper half (as bitsandbytes and torchao pack them); "int8" rounds
to 127 steps on either side of zero. Double quantization keeps the blocks' scales in 8 bits as well: less their mean, in
steps of 1/128 of the largest of 256 of them (torchao's linear steps; bitsandbytes has a code book there).

Blocks run along the last dim, and the scales that share a step are a tile of neighbours in both dims, so a weight can
be cut in rows or in columns: what holds some whole tiles of all four tensors dequantizes to its part of the weight. Of
a weight (..., o, i) with blocks of b and tiles of R rows and C blocks (`tile_of`) they are

    packed  (..., o, i / 2) uint8, or (..., o, i) int8      codes
    absmax  (..., o, i / b) int8, float32 if not doubly     scales
    scale   (..., o / R, i / b / C) float32                 steps of the scales
    offset  () float32                                      their mean

which for 4 bits, b = 64 and full tiles is 4 + 8 / 64 + 32 / (64 * 256) = 4.127 bits a weight.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import custom_op

CODES = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": tuple(x / 12 for x in (0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3)),
}  # fmt: skip
QUANT_TYPES = (*CODES, "int8")
INT8_STEPS, SCALE_STEPS = 127, 128
TILE_ROWS, TILE_BLOCKS, FEWEST = 64, 4, 128  # of a tile: sizes, and the least number of scales that is worth a step
CHUNK = 2**22  # elements that are rounded at once


@custom_op("autopar::dequantize", mutates_args=())
def dequantize(
    packed: Tensor, absmax: Tensor, scale: Tensor | None, offset: Tensor | None, quant_type: str, dtype: torch.dtype
) -> Tensor:
    """Return the weight (..., o, i) in `dtype` from the tensors said above; without double quantization there is no
    scale and offset."""
    if scale is not None:
        absmax = absmax * _spread(scale, absmax.shape) + offset
    if quant_type == "int8":
        values = packed.to(absmax.dtype) / INT8_STEPS
    else:
        pairs = _pairs(quant_type, packed.device).index_select(0, packed.reshape(-1).int())
        values = pairs.view(*packed.shape[:-1], 2 * packed.shape[-1])
    blocks = values.unflatten(-1, (absmax.shape[-1], -1)) * absmax.unsqueeze(-1)
    return blocks.flatten(-2).to(dtype)


@dequantize.register_fake
def _(packed, absmax, scale, offset, quant_type, dtype):
    columns = packed.shape[-1] * (1 if quant_type == "int8" else 2)
    return packed.new_empty(*packed.shape[:-1], columns, dtype=dtype)


@functools.cache
def _pairs(quant_type: str, device: torch.device) -> Tensor:
    """Return the two values of every byte: (256, 2)."""
    codes = torch.tensor(CODES[quant_type])
    return torch.cartesian_prod(codes, codes).to(device)


def _spread(scale: Tensor, shape: Sequence[int]) -> Tensor:
    """Repeat a number for each tile as one for each block."""
    rows, blocks = shape[-2] // scale.shape[-2], shape[-1] // scale.shape[-1]
    return scale.repeat_interleave(rows, -2).repeat_interleave(blocks, -1)


def tile_of(rows: int, blocks: int) -> tuple[int, int]:
    """Return the rows and blocks of a tile: at most 64 x 4, less where a matrix has no multiple of them, with more rows
    for few blocks."""
    across = math.gcd(blocks, TILE_BLOCKS)
    return math.gcd(rows, max(TILE_ROWS, FEWEST // across)), across


def forms_of_parts(
    shape: Sequence[int], quant_type: str, block_size: int, double_quant: bool
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of each of the tensors that a weight of this shape becomes."""
    *stack, rows, columns = shape
    blocks = columns // block_size
    codes = (
        ((*stack, rows, columns), torch.int8) if quant_type == "int8" else ((*stack, rows, columns // 2), torch.uint8)
    )
    forms = {"packed": codes, "absmax": ((*stack, rows, blocks), torch.int8 if double_quant else torch.float32)}
    if double_quant:
        down, across = tile_of(rows, blocks)
        forms |= {"scale": ((*stack, rows // down, blocks // across), torch.float32), "offset": ((), torch.float32)}
    return forms


@torch.no_grad()
def quantize(weight: Tensor, quant_type: str, block_size: int, double_quant: bool) -> dict[str, Tensor]:
    """Return the tensors that a weight (..., o, i) becomes; i is a multiple of `block_size`, which is even."""
    forms = forms_of_parts(weight.shape, quant_type, block_size, double_quant)
    blocks = weight.unflatten(-1, (-1, block_size))
    largest = torch.maximum(blocks.amax(-1), -blocks.amin(-1)).float()
    parts = {"packed": _packed(blocks, largest, quant_type).view(forms["packed"][0])}
    if not double_quant:
        return parts | {"absmax": largest}
    offset = largest.mean()
    centred = largest - offset
    tiles_down, tiles_across = forms["scale"][0][-2:]
    tiles = centred.unflatten(-1, (tiles_across, -1)).unflatten(-3, (tiles_down, -1))  # (..., down, R, across, C)
    scale = tiles.abs().amax((-3, -1)) / SCALE_STEPS
    steps = torch.where(scale > 0, scale, 1.0)
    absmax = (centred / _spread(steps, centred.shape)).round().clamp(-SCALE_STEPS, SCALE_STEPS - 1).to(torch.int8)
    return parts | {"absmax": absmax, "scale": scale, "offset": offset}


def _packed(blocks: Tensor, largest: Tensor, quant_type: str) -> Tensor:
    """Return the codes of the blocks (..., b) of which `largest` (...) has the largest absolute values; flat, made a
    few blocks at a time."""
    size = blocks.shape[-1]
    norms = torch.where(largest > 0, largest, 1.0).reshape(-1, 1)
    chunks = zip(*(x.split(max(1, CHUNK // size)) for x in (blocks.reshape(-1, size), norms)))
    return torch.cat([_codes(some.float() / norm, quant_type) for some, norm in chunks])


def _codes(values: Tensor, quant_type: str) -> Tensor:
    """Return the codes of values from -1 to 1: int8, or those of two neighbours in a byte."""
    if quant_type == "int8":
        return (values * INT8_STEPS).round().to(torch.int8)
    book, order = torch.tensor(CODES[quant_type], device=values.device).sort()
    nearest = order[torch.bucketize(values, (book[1:] + book[:-1]) / 2, out_int32=True)].to(torch.uint8)
    return nearest[..., ::2] << 4 | nearest[..., 1::2]
