"""The kernel of autopar/ops/packed_linear.py, in Triton, which is there where torch is built for CUDA.

A program makes OUTPUTS columns of the result for up to ROWS rows. It goes over the weight's rows PAIRS bytes at a time:
a byte has two neighbours of a row, so that the even and the odd columns of x are multiplied apart, and nothing has to
be interleaved. A number of the weight is book[code] * scale of its block, rounded to the type of x as `dequantize`
does; sums are in fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ROWS, OUTPUTS, PAIRS, WARPS = 16, 16, 128, 4


@triton.jit
def _kernel(
    x,
    packed,
    absmax,
    scale,
    offset,
    book,
    out,
    rows,
    outputs,
    pairs,
    block_pairs,
    tile_rows,
    tile_blocks,
    DOUBLY: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_output = row < rows, output < outputs
    blocks = pairs // block_pairs
    mean = tl.load(offset) if DOUBLY else 0.0
    total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for first in range(0, pairs, PAIRS):
        pair = first + tl.arange(0, PAIRS)
        is_pair, block = pair < pairs, pair // block_pairs
        here = is_output[:, None] & is_pair[None, :]
        code = tl.load(packed + output[:, None] * pairs + pair[None, :], mask=here, other=0).to(tl.int32)
        largest = tl.load(absmax + output[:, None] * blocks + block[None, :], mask=here, other=0).to(tl.float32)
        if DOUBLY:
            tile = (output // tile_rows)[:, None] * (blocks // tile_blocks) + (block // tile_blocks)[None, :]
            largest = largest * tl.load(scale + tile, mask=here, other=0.0) + mean
        upper = tl.load(book + (code >> 4)) * largest
        lower = tl.load(book + (code & 15)) * largest
        is_x, at = is_row[:, None] & is_pair[None, :], row[:, None] * (2 * pairs) + 2 * pair[None, :]
        even, odd = tl.load(x + at, mask=is_x, other=0.0), tl.load(x + at + 1, mask=is_x, other=0.0)
        total += tl.dot(even, tl.trans(upper.to(even.dtype)), input_precision="ieee")
        total += tl.dot(odd, tl.trans(lower.to(odd.dtype)), input_precision="ieee")
    there = is_row[:, None] & is_output[None, :]
    tl.store(out + row[:, None] * outputs + output[None, :], total.to(out.dtype.element_ty), mask=there)


def product(
    x: Tensor, packed: Tensor, absmax: Tensor, scale: Tensor | None, offset: Tensor | None, book: Tensor
) -> Tensor:
    """Return x (r, i) times a weight (o, i): (r, o), for at most ROWS rows."""
    (outputs, pairs), rows = packed.shape, x.shape[0]
    blocks = absmax.shape[-1]
    out = x.new_empty(rows, outputs)
    tile = (1, 1) if scale is None else (outputs // scale.shape[0], blocks // scale.shape[1])
    tensors = [t.contiguous() for t in (packed, absmax)]
    _kernel[(triton.cdiv(outputs, OUTPUTS),)](
        x.contiguous(),
        *tensors,
        book if scale is None else scale.contiguous(),
        book if offset is None else offset,
        book,
        out,
        rows,
        outputs,
        pairs,
        pairs // blocks,
        *tile,
        DOUBLY=scale is not None,
        ROWS=ROWS,
        OUTPUTS=OUTPUTS,
        PAIRS=PAIRS,
        num_warps=WARPS,
    )
    return out
