"""torch's products of 8-bit floats on CUDA, whose scales have an interface that still changes."""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor
from torch.nn import functional

SCALES = 4  # to a multiple of which cuBLAS wants the scales of square blocks along the depth


def scaled_product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a b^T in `dtype`, added up in fp32, of float8 matrices a (m, k) and b (n, k). Scales are () both, or a's
    (m, k / 128) and b's (n, k / 128) or (n / 128, k / 128); n and k are multiples of 16, of 128 in blocks."""
    a, b = a.contiguous(), b.contiguous()
    if not a_scale.dim():
        return torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=dtype)
    kinds = functional.ScalingType
    is_square = b_scale.shape[0] < b.shape[0]
    return functional.scaled_mm(
        a,
        b.t(),
        scale_a=_rows_first(a_scale),
        scale_recipe_a=kinds.BlockWise1x128,
        scale_b=_padded(b_scale).t() if is_square else _rows_first(b_scale),
        scale_recipe_b=kinds.BlockWise128x128 if is_square else kinds.BlockWise1x128,
        output_dtype=dtype,
    )


def _rows_first(scale: Tensor) -> Tensor:
    """Return scales (m, k / 128) with those of one column next to each other in memory."""
    return scale.t().contiguous().t()


def _padded(scale: Tensor) -> Tensor:
    """Return scales (n / 128, k / 128) with as many columns as cuBLAS wants."""
    return functional.pad(scale, (0, -scale.shape[1] % SCALES), value=1.0).contiguous()


@functools.cache
def has_scaled_product(device: torch.device, in_blocks: bool, dtype: torch.dtype) -> bool:
    """Return whether a device has products of 8-bit floats with such scales in `dtype`; warn of a GPU that has none."""
    if device.type != "cuda":
        return False
    if missing := _missing(device, in_blocks, dtype):
        kind = "in blocks" if in_blocks else "by tensor"
        warnings.warn(
            f"{torch.cuda.get_device_name(device)} has no products of 8-bit floats {kind} ({missing}): their factors "
            "are converted first, which takes longer than bf16",
            stacklevel=2,
        )
    return not missing


def _missing(device: torch.device, in_blocks: bool, dtype: torch.dtype) -> str:
    """Return why a GPU has no such product, "" if it has: it is asked for one."""
    needed = (9, 0) if in_blocks else (8, 9)
    if torch.cuda.get_device_capability(device) < needed:
        return f"compute capability {needed[0]}.{needed[1]} has them"
    zeros = torch.zeros(128, 128, dtype=torch.float8_e4m3fn, device=device)
    rows, square = (torch.ones(shape, device=device) for shape in (((128, 1), (1, 1)) if in_blocks else ((), ())))
    try:
        scaled_product(zeros, rows, zeros, square, dtype)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # which scales there are depends on the version of cuBLAS
        return str(error).partition("\n")[0]
    return ""
