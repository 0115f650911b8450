"""Matrix products of one device: what an op multiplies there.

A product is (batch, rows, columns, depth) = (b, m, n, k): b times an m x k matrix with a k x n one, 2 b m n k FLOPs.
autopar/cost/product_seconds.py says how long it takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from ..ir.graph import tensor_arguments, values_of
from ..ops import autopar

aten = torch.ops.aten

Product = tuple[int, int, int, int]
Shape = Sequence[int]


def _rows(shape: Shape) -> int:
    return math.prod(shape[:-1])


def _linear(x: Shape, weight: Shape, *_) -> list[Product]:
    return [(1, _rows(x), weight[0], x[-1])]


def _linear_dx(grad: Shape, weight: Shape, *_) -> list[Product]:
    return [(1, _rows(grad), weight[-1], grad[-1])]


def _linear_dw(grad: Shape, x: Shape, *_) -> list[Product]:
    return [(1, grad[-1], x[-1], _rows(grad))]


def _matmul(a: Shape, b: Shape, *_) -> list[Product]:
    return [(math.prod(a[:-2]), a[-2], b[-1], a[-1])]


def _addmm(_, a: Shape, b: Shape, *__) -> list[Product]:
    return _matmul(a, b)


def _grouped(x: Shape, weight: Shape, *_) -> list[Product]:
    groups = weight[0]
    return [(groups, math.ceil(x[0] / groups), weight[2], x[1])]


def _grouped_dw(x: Shape, grad: Shape, _, dw: Shape) -> list[Product]:
    return [(dw[0], x[1], grad[1], math.ceil(x[0] / dw[0]))]


def _convolution(x: Shape, weight: Shape, *rest: Shape) -> list[Product]:
    """Return a convolution as a product with unfolded patches; `x` has groups * weight[1] channels."""
    y = rest[-1]
    groups = max(1, x[1] // weight[1])
    return [(groups, y[0] * math.prod(y[2:]), weight[0] // groups, math.prod(weight[1:]))]


def _convolution_backward(grad: Shape, x: Shape, weight: Shape, *_) -> list[Product]:
    ((groups, rows, columns, depth),) = _convolution(x, weight, grad)
    return [(groups, rows, depth, columns), (groups, columns, depth, rows)]  # of the input, of the weight


def _fp8(product):
    """Return what counts the same product of codes, each of which is followed by its scales."""
    return lambda a, _, b, *__: product(a, b)


PRODUCTS = {
    autopar.linear.default: _linear, autopar.linear_dx.default: _linear_dx, autopar.linear_dw.default: _linear_dw,
    autopar.fp8_linear.default: _fp8(_linear), autopar.fp8_linear_dx.default: _fp8(_linear_dx),
    autopar.fp8_linear_dw.default: _fp8(_linear_dw),
    aten.mm.default: _matmul, aten.bmm.default: _matmul, autopar.matmul.default: _matmul, aten.addmm.default: _addmm,
    aten.baddbmm.default: _addmm, autopar.grouped_mm.default: _grouped, autopar.grouped_mm_dw.default: _grouped_dw,
    aten.convolution.default: _convolution, aten.convolution_backward.default: _convolution_backward,
}  # fmt: skip


def shapes_of(node: fx.Node) -> list[tuple[int, ...]]:
    """Return the global shapes of the tensor arguments and outputs."""
    return [tuple(value.shape) for value in (*(a.meta["val"] for a in tensor_arguments(node)), *values_of(node))]
