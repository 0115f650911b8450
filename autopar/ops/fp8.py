"""Numbers in 8 bits with a scale a block or a tensor: what a linear layer computes with in FP8 (see fp8_linear.py).

    scale = largest finite number of the format / max(largest |x| of the block, 1e-12),    code = round(x * scale)

The division is done in float64 and rounded to float32; the largest product exceeds the format's range by less than half
a step, so it needs no clamping. What is handed on is 1 / scale, the value of a step. So codes and scales are bit for
bit those of torchao: of its float8 training by tensor (torchao.float8) and in blocks (torchao.prototype's
blockwise_fp8_training, after DeepSeek-V3, arXiv 2412.19437, section 3.3). Blocks are

    fp8_rows      1 x 128, along the features that a product adds up over: activations, gradients of outputs
    fp8_columns   128 x 1, along the tokens, for the gradient of a weight
    fp8_blocks    128 x 128, weights, so that their transpose has the same codes
    fp8_tensor    all of it, by a largest value that `fp8_amax` says (of a tensor in parts: the largest of its parts')

The last block of a dim may be shorter. Codes are the bytes of the format as uint8: every way to send or to copy bytes
takes them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

BLOCK = 128
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LEAST = 1e-12  # what the largest value counts as at least


@custom_op("autopar::fp8_rows", mutates_args=())
def fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x (..., i) in blocks of a row: codes (..., i), scales (..., i / 128)."""
    codes, scale = _by_blocks(x.unsqueeze(-2), 1, BLOCK)
    return codes.squeeze(-2), scale.squeeze(-2)


@custom_op("autopar::fp8_columns", mutates_args=())
def fp8_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x (..., t, i) in blocks of a column: codes (..., t, i), scales (..., t / 128, i)."""
    return _by_blocks(x, BLOCK, 1)


@custom_op("autopar::fp8_blocks", mutates_args=())
def fp8_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a weight (o, i) in square blocks: codes (o, i), scales (o / 128, i / 128)."""
    return _by_blocks(weight, BLOCK, BLOCK)


@custom_op("autopar::fp8_amax", mutates_args=())
def fp8_amax(x: Tensor) -> Tensor:
    """Return the largest absolute value of x: (...) -> (), in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if not x.numel():  # a device with nothing of a tensor in uneven parts
        return x.new_zeros((), dtype=wide)
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high).to(wide)


@custom_op("autopar::fp8_tensor", mutates_args=())
def fp8_tensor(x: Tensor, amax: Tensor, format: str) -> Tensor:
    """Quantize x (...) with one scale to "e4m3" or "e5m2": codes (...)."""
    return _codes(x.unsqueeze(-1), _scale(amax, format).view(1), format).squeeze(-1)


@custom_op("autopar::fp8_step", mutates_args=())
def fp8_step(amax: Tensor, format: str) -> Tensor:
    """Return the value of a step of those codes: () -> ()."""
    return 1.0 / _scale(amax, format)


def by_tensor(x: Tensor, amax: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """Return codes and scale of x, of which `amax` is the largest absolute value."""
    return fp8_tensor(x, amax, format), fp8_step(amax, format)


def _scale(amax: Tensor, format: str) -> Tensor:
    return (torch.finfo(FORMATS[format]).max / amax.double().clamp_min(LEAST)).float()


def _codes(x: Tensor, scale: Tensor, format: str) -> Tensor:
    """Return codes as x; `scale` broadcasts against it, and has a dim, so that the product is as wide as it."""
    return (x * scale).to(FORMATS[format]).view(torch.uint8)


def _by_blocks(x: Tensor, down: int, across: int) -> tuple[Tensor, Tensor]:
    """Quantize x (..., r, c) in blocks of this size: codes (..., r, c), scales (..., r / down, c / across)."""
    *_, rows, columns = x.shape
    whole = filled(x, (0, -columns % across, 0, -rows % down))
    sizes = (blocks_in(rows, down), down), (blocks_in(columns, across), across)
    blocks = whole.unflatten(-1, sizes[1]).unflatten(-3, sizes[0])  # (..., R, down, C, across)
    scale = _scale(torch.linalg.vector_norm(blocks, torch.inf, (-3, -1), keepdim=True), "e4m3")
    codes = _codes(blocks, scale, "e4m3").flatten(-4, -3).flatten(-2)
    return codes.narrow(-2, 0, rows).narrow(-1, 0, columns).contiguous(), (1.0 / scale).squeeze(-1).squeeze(-2)


def filled(x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Return x with zeros around it, as torch's `pad` counts them; x itself if there are none."""
    return torch.nn.functional.pad(x, sizes) if any(sizes) else x


def blocks_in(size: int, block: int = BLOCK) -> int:
    """Return how many blocks a dim has, the last one perhaps shorter."""
    return -(-size // block)


def dequantized(codes: Tensor, scale: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    """Return the numbers that codes (..., r, c) stand for. `scale`: () or for blocks of the last two dims."""
    for dim in (-2, -1) if scale.dim() > 1 else (-1,) if scale.dim() else ():
        size = codes.shape[dim]
        if scale.shape[dim] < size:
            scale = scale.repeat_interleave(BLOCK, dim).narrow(dim, 0, size)
    return codes.view(FORMATS[format]).to(dtype) * scale


def _new_codes(x: Tensor) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.uint8)


def _new_scales(x: Tensor, down: int, across: int) -> Tensor:
    *stack, rows, columns = x.shape
    return x.new_empty((*stack, blocks_in(rows, down), blocks_in(columns, across)), dtype=torch.float32)


fp8_rows.register_fake(lambda x: (_new_codes(x), _new_scales(x.unsqueeze(-2), 1, BLOCK).squeeze(-2)))
fp8_columns.register_fake(lambda x: (_new_codes(x), _new_scales(x, BLOCK, 1)))
fp8_blocks.register_fake(lambda weight: (_new_codes(weight), _new_scales(weight, BLOCK, BLOCK)))
fp8_amax.register_fake(lambda x: x.new_empty((), dtype=torch.promote_types(x.dtype, torch.float32)))
fp8_tensor.register_fake(lambda x, amax, format: _new_codes(x))
fp8_step.register_fake(lambda amax, format: amax.new_empty((), dtype=torch.float32))
