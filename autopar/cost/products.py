"""Matrix products of one device: what an op multiplies there, and which share of the peak a product of that size
reaches.

A product is (batch, rows, columns, depth) = (b, m, n, k): b times an m x k matrix with a k x n one, 2 b m n k FLOPs.
Its share of the peak is that of a large product times

    waves    b ceil(m / tile rows) ceil(n / tile columns) tiles are handed to the multiprocessors in whole waves: the share is
             the work of the tiles that are needed over that of all waves. Half a tile, a quarter, ... or k cut into
             parts leave less idle but are slower each; the best counts
    ramp     k / (k + half_depth), and so for m and n: a tile needs depth until its loads are hidden
    aligned  rows of the operands that are not whole vectors of 16 bytes are loaded one number at a time

Waves: NVIDIA, "Matrix Multiplication Background User's Guide", which also gives the rule of alignment. What is not in
it is marked as an estimate below.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from ..hardware.profile import Kernels
from ..ir.graph import tensor_arguments, values_of
from ..ops import autopar

aten = torch.ops.aten

Product = tuple[int, int, int, int]
Shape = Sequence[int]

LARGE = 8192  # a profile's efficiency is that of a product of so many rows, columns and depth
HALF_TILE = (
    0.9  # share of a tile's speed that half of it reaches, as it loads more for each multiplication: an estimate
)
HALVINGS, SPLITS = (0, 1, 2, 3), (1, 2, 4, 8, 16)
MISALIGNED = 0.6  # an estimate; older libraries lost more
VECTOR_BYTES = 16
SPLIT = 0.9  # parts of k are summed up afterwards: an estimate


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


PRODUCTS = {
    autopar.linear.default: _linear, autopar.linear_dx.default: _linear_dx, autopar.linear_dw.default: _linear_dw,
    aten.mm.default: _matmul, aten.bmm.default: _matmul, autopar.matmul.default: _matmul, aten.addmm.default: _addmm,
    aten.baddbmm.default: _addmm, autopar.grouped_mm.default: _grouped, autopar.grouped_mm_dw.default: _grouped_dw,
    aten.convolution.default: _convolution, aten.convolution_backward.default: _convolution_backward,
}  # fmt: skip


def products_of(node: fx.Node, shapes: Sequence[Shape]) -> list[Product]:
    """Return what an op multiplies when its tensors, arguments first and then outputs, have these shapes; [] if
    nothing."""
    found = PRODUCTS.get(node.target)
    return found(*shapes) if found else []


def shapes_of(node: fx.Node) -> list[tuple[int, ...]]:
    """Return the global shapes of the tensor arguments and outputs."""
    return [tuple(value.shape) for value in (*(a.meta["val"] for a in tensor_arguments(node)), *values_of(node))]


class Shares:
    """Which share of the peak products reach on one kind of device, remembered."""

    def __init__(self, kernels: Kernels, efficiency: float):
        self.kernels = kernels
        self._known: dict[tuple[Product, int], float] = {}
        self._of_large = efficiency / self._relative((1, LARGE, LARGE, LARGE))

    def __call__(self, product: Product, element_bytes: int) -> float:
        """Return the share of the peak that a product reaches. `element_bytes`: of a number of the operands."""
        key = (product, element_bytes)
        if key not in self._known:
            self._known[key] = min(
                1.0, self._of_large * self._relative(product) * self._aligned(product, element_bytes)
            )
        return self._known[key]

    def _relative(self, product: Product) -> float:
        batch, m, n, k = product
        kernels = self.kernels
        ramp = m / (m + kernels.half_rows) * n / (n + kernels.half_columns)
        if not kernels.multiprocessors:
            return ramp * k / (k + kernels.half_depth)
        best = 0.0
        for halvings in HALVINGS:
            rows, columns = kernels.tile[0] >> (halvings // 2), kernels.tile[1] >> ((halvings + 1) // 2)
            tiles, needed = batch * math.ceil(m / rows) * math.ceil(n / columns), batch * m * n / (rows * columns)
            for parts in SPLITS:
                waves = math.ceil(tiles * parts / kernels.multiprocessors) * kernels.multiprocessors
                depth = k / parts
                share = HALF_TILE**halvings * (SPLIT if parts > 1 else 1.0) * needed * parts / waves
                best = max(best, share * depth / (depth + kernels.half_depth))
        return ramp * best

    def _aligned(self, product: Product, element_bytes: int) -> float:
        if not self.kernels.multiprocessors or element_bytes > 2:
            return 1.0
        return MISALIGNED if any(size * element_bytes % VECTOR_BYTES for size in product[2:]) else 1.0

    def waves_of(self, blocks: int) -> float:
        """Return the share of the multiprocessors that so many equal blocks of work keep busy."""
        many = self.kernels.multiprocessors
        return blocks / (math.ceil(blocks / many) * many) if many and blocks else 1.0
