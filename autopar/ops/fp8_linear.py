"""Linear layers whose three products, of output, input's gradient and weight's gradient, multiply 8-bit floats.

    block    x, gradients in rows of 128 and weights in blocks of 128 x 128; for the gradient of the weight, which adds
             up over tokens, both in columns of 128: DeepSeek-V3, arXiv 2412.19437, section 3.3, all of it e4m3
    tensor   a scale for each of x, weight and gradient; the gradient is e5m2 (torchao's "tensorwise" recipe)

`linear_in_fp8` stands for all of a layer in a forward graph and comes apart where that is differentiated: quantizations
and products are nodes of their own then. The products run as such where the GPU has them, and elsewhere dequantize and
multiply in fp32 (or wider): the same numbers but for rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import Library, custom_op

from .._torch.scaled_products import has_scaled_product, scaled_product
from .attention_forms import contiguous
from .fp8 import BLOCK, FORMATS, by_tensor, dequantized, filled, fp8_amax, fp8_blocks, fp8_columns, fp8_rows

RECIPES = ("block", "tensor")
FORWARD, GRADIENT = "e4m3", "e5m2"
ALIGNED = 16  # to a multiple of which a product's depth is filled up with zeros


@custom_op("autopar::fp8_linear", mutates_args=())
def fp8_linear(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply codes of x by those of the transposed weight: (..., i), (o, i) -> (..., o) in `dtype`."""
    y = _product(*_rows(x, x_scale), weight, weight_scale, FORWARD, dtype)
    return y.view(*x.shape[:-1], weight.shape[0])


@custom_op("autopar::fp8_linear_dx", mutates_args=())
def fp8_linear_dx(
    grad: Tensor, grad_scale: Tensor, weight: Tensor, weight_scale: Tensor, format: str, dtype: torch.dtype
) -> Tensor:
    """Return the gradient of the input: (..., o), (o, i) -> (..., i). `format`: of the gradient's codes."""
    dx = _product(*_rows(grad, grad_scale), weight.t(), _transposed(weight_scale), format, dtype)
    return dx.view(*grad.shape[:-1], weight.shape[1])


@custom_op("autopar::fp8_linear_dw", mutates_args=())
def fp8_linear_dw(
    grad: Tensor, grad_scale: Tensor, x: Tensor, x_scale: Tensor, format: str, dtype: torch.dtype
) -> Tensor:
    """Return the gradient of the weight: (..., t, o), (..., t, i) -> (o, i), scales in columns or ()."""
    grad, x = (_in_whole_blocks(codes, BLOCK if x_scale.dim() else 1) for codes in (grad, x))
    a, b = ((codes.t(), _transposed(_matrix(scale))) for codes, scale in ((grad, grad_scale), (x, x_scale)))
    return _product(*a, *b, format, dtype)


fp8_linear.register_fake(lambda x, _, weight, __, dtype: _new(x, (*x.shape[:-1], weight.shape[0]), dtype))
fp8_linear_dx.register_fake(
    lambda grad, _, weight, __, format, dtype: _new(grad, (*grad.shape[:-1], weight.shape[1]), dtype)
)
fp8_linear_dw.register_fake(lambda grad, _, x, __, format, dtype: _new(grad, (grad.shape[-1], x.shape[-1]), dtype))


def _new(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return like.new_empty(shape, dtype=dtype)


def _product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    """Return a b^T of codes a (m, k) in `format` and b (n, k)."""
    if _has_kernel(a, b, bool(a_scale.dim()), dtype):
        a, b = _filled_depth(a).view(FORMATS[format]), _filled_depth(b).view(FORMATS[FORWARD])
        return scaled_product(a, a_scale, b, b_scale, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    a, b = dequantized(a, a_scale, format, wide), dequantized(b, b_scale, FORWARD, wide)
    return (a @ b.t()).to(dtype)


def _has_kernel(a: Tensor, b: Tensor, in_blocks: bool, dtype: torch.dtype) -> bool:
    aligned = b.shape[0] % ALIGNED == 0 and not (in_blocks and (a.shape[1] % BLOCK or b.shape[0] % BLOCK))
    return a.is_cuda and aligned and a.numel() > 0 and has_scaled_product(a.device, in_blocks, dtype)


def _filled_depth(codes: Tensor) -> Tensor:
    """Return codes (m, k) with zeros to a multiple of 16, in rows."""
    return contiguous(filled(codes, (0, -codes.shape[1] % ALIGNED)))


def _in_whole_blocks(codes: Tensor, block: int) -> Tensor:
    """Return codes (..., t, i) as a matrix in which every sequence has whole blocks of tokens."""
    return _matrix(filled(codes, (0, 0, 0, -codes.shape[-2] % block)))


def _rows(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return _matrix(codes), _matrix(scale)


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]) if x.dim() else x


def _transposed(scale: Tensor) -> Tensor:
    return scale.t() if scale.dim() else scale


class _InBlocks(torch.autograd.Function):
    """The recipe "block". It saves x and weight as they are, and quantizes them again along the other dim."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        wants_dx, wants_dw = ctx.needs_input_grad
        ctx.save_for_backward(x if wants_dw else None, weight if wants_dx else None)
        return fp8_linear(*fp8_rows(x), *fp8_blocks(weight), x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        dx = dw = None
        if weight is not None:
            dx = fp8_linear_dx(*fp8_rows(grad), *fp8_blocks(weight), FORWARD, grad.dtype)
        if x is not None:
            dw = fp8_linear_dw(*fp8_columns(grad), *fp8_columns(x), FORWARD, grad.dtype)
        return dx, dw


class _ByTensor(torch.autograd.Function):
    """The recipe "tensor". It saves the codes of x, and the weight with its largest value: codes of the whole weight
    would be more than what a device stores of it."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        amax = fp8_amax(weight)
        codes = by_tensor(x, fp8_amax(x), FORWARD)
        ctx.save_for_backward(*codes, weight, amax)
        return fp8_linear(*codes, *by_tensor(weight, amax, FORWARD), x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, x_scale, weight, amax = ctx.saved_tensors
        codes = by_tensor(grad, fp8_amax(grad), GRADIENT)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = fp8_linear_dx(*codes, *by_tensor(weight, amax, FORWARD), GRADIENT, grad.dtype)
        if ctx.needs_input_grad[1]:
            dw = fp8_linear_dw(*codes, x, x_scale, GRADIENT, grad.dtype)
        return dx, dw


def linear_in_fp8(x: Tensor, weight: Tensor, recipe: str) -> Tensor:
    """Multiply x by the transposed weight, both quantized as a recipe says: (..., i), (o, i) -> (..., o)."""
    function = _InBlocks if recipe == "block" else _ByTensor
    rows = x if x.dim() > 1 else x.unsqueeze(0)
    return function.apply(rows, weight).view(*x.shape[:-1], weight.shape[0])


_LIBRARY = Library("autopar", "FRAGMENT")
_LIBRARY.define("linear_in_fp8(Tensor x, Tensor weight, str recipe) -> Tensor")
_LIBRARY.impl("linear_in_fp8", linear_in_fp8, "CompositeImplicitAutograd")
