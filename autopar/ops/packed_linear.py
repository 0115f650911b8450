"""A product of few rows with a weight in 4 bits: `autopar::packed_linear`.

Where a model decodes, a layer reads its weight once for a row or a few, and takes as long as that. Dequantized first,
4 bits are read, 16 written and 16 read again; here codes become numbers between memory and product
(packed_linear_kernel.py, on GPUs that Triton compiles for). More rows than MOST_ROWS pay for a weight that is written
out. Elsewhere the weight is dequantized.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import custom_op

from .nf4 import CODES, dequantize

MOST_ROWS = 16


@custom_op("autopar::packed_linear", mutates_args=())
def packed_linear(
    x: Tensor, packed: Tensor, absmax: Tensor, scale: Tensor | None, offset: Tensor | None, quant_type: str
) -> Tensor:
    """Return x (..., i) times the weight (o, i) of these tensors (autopar/ops/nf4.py), (..., o) in the type of x."""
    if has_kernel(x.device):
        from .packed_linear_kernel import product

        rows = x.reshape(-1, x.shape[-1])
        return product(rows, packed, absmax, scale, offset, book_of(quant_type, x.device)).view(
            *x.shape[:-1], packed.shape[0]
        )
    weight = dequantize(packed, absmax, scale, offset, quant_type, x.dtype)
    return torch.ops.aten.linear.default(x, weight)


@packed_linear.register_fake
def _(x, packed, absmax, scale, offset, quant_type):
    return x.new_empty(*x.shape[:-1], packed.shape[0])


def takes(x: Sequence[int], packed: Sequence[int], quant_type: object, device: torch.device) -> bool:
    """Return whether a product with a weight, `packed`, is better made of its codes: of few rows of a GPU."""
    rows = torch.Size(x[:-1]).numel()
    return quant_type in CODES and len(packed) == 2 and 0 < rows <= MOST_ROWS and device.type == "cuda"


def has_kernel(device: torch.device) -> bool:
    """Return whether there is a kernel for a device."""
    return device.type == "cuda" and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def book_of(quant_type: str, device: torch.device) -> Tensor:
    """Return the 16 numbers of a code book on a device."""
    return torch.tensor(CODES[quant_type], device=device)
