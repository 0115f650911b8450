"""Instances of 8-bit floats: dims of several whole blocks, of one that is not whole, and stacks of tokens."""

from __future__ import annotations

import torch

from autopar.ops import autopar
from autopar.ops.fp8 import by_tensor

from .instances import op, real


def quantized(x: torch.Tensor, format: str = "e4m3") -> tuple[torch.Tensor, torch.Tensor]:
    return by_tensor(x, autopar.fp8_amax(x), format)


for shape in ((3, 384), (2, 5, 200), (256,)):
    op("autopar.fp8_rows.default", real(*shape))
for shape in ((256, 6), (4, 384, 5), (3, 40, 6)):
    op("autopar.fp8_columns.default", real(*shape))
for shape in ((384, 256), (128, 144)):
    op("autopar.fp8_blocks.default", real(*shape))
for shape in ((4, 5, 6), (7,)):
    op("autopar.fp8_amax.default", real(*shape))
    op("autopar.fp8_tensor.default", real(*shape), autopar.fp8_amax(real(*shape)), "e5m2")
op("autopar.fp8_step.default", real().abs(), "e4m3")

# products: (tokens, outputs, inputs)
for tokens, outputs, inputs in (((5,), 256, 384), ((4, 256), 384, 128), ((3, 40), 128, 144)):
    x, grad, weight = real(*tokens, inputs), real(*tokens, outputs), real(outputs, inputs)
    square = autopar.fp8_blocks(weight)
    op("autopar.fp8_linear.default", *autopar.fp8_rows(x), *square, torch.float64)
    op("autopar.fp8_linear_dx.default", *autopar.fp8_rows(grad), *square, "e4m3", torch.float64)
    columns = (*autopar.fp8_columns(grad), *autopar.fp8_columns(x))
    op("autopar.fp8_linear_dw.default", *columns, "e4m3", torch.float64)
for tokens, outputs, inputs in (((5,), 32, 48), ((4, 6), 96, 16), ((3, 2), 20, 24)):
    x, grad, weight = quantized(real(*tokens, inputs)), real(*tokens, outputs), quantized(real(outputs, inputs))
    grad = quantized(grad, "e5m2")
    op("autopar.fp8_linear.default", *x, *weight, torch.float64)
    op("autopar.fp8_linear_dx.default", *grad, *weight, "e5m2", torch.float64)
    op("autopar.fp8_linear_dw.default", *grad, *x, "e5m2", torch.float64)
