"""Grids of integers that values are rounded to: how many, which values share a scale, and how the scale follows from a
range.

The words are those of torchao's IntxFakeQuantizeConfig (torchao.quantization.qat), and so are the formulas
(choose_qparams_affine in torchao.quantization.quant_primitives), with 0 in every range [low, high]:

    symmetric     scale = max(-low, high) / ((qmax - qmin) / 2)
    asymmetric    scale = (high - low) / (qmax - qmin),    zero_point = clamp(qmin - round(low / scale), qmin, qmax)

They are written in `call(op, *arguments)` of ATen's ops, so that a pass writes into a graph what `eager` computes on
tensors. The smallest value is minus the largest of the negative ones: a maximum is what may be taken of parts on
several devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

aten = torch.ops.aten

DTYPES = tuple(f"int{bits}" for bits in range(2, 9))
MAPPINGS = ("symmetric", "asymmetric")
LEAST = torch.finfo(torch.float32).smallest_normal  # the smallest scale, that of a range of zeros

Call = Callable  # (op, *arguments) -> a tensor or a graph node


def eager(op, *arguments):
    """Run an op on tensors: the `call` that computes, and writes no graph."""
    return op(*arguments)


def limits(call: Call, x, dims: list[int], keepdim: bool, dtype: torch.dtype):
    """Return (low, high), the smallest and the largest value of x along `dims`, in another type."""
    low = call(aten.neg.default, call(aten.amax.default, call(aten.neg.default, x), dims, keepdim))
    return call(aten.to.dtype, low, dtype), call(aten.to.dtype, call(aten.amax.default, x, dims, keepdim), dtype)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the type that ranges of values of `dtype` are kept in."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class Grid:
    """`dtype`: "int2" to "int8"; `granularity`: what shares a scale, "per_tensor", "per_token" and "per_channel" (all
    along the last dim), or "per_group" (`group_size` elements along it); `mapping_type`: "symmetric" or "asymmetric"
    (with a zero point)."""

    dtype: str
    granularity: str
    mapping_type: str = "symmetric"
    group_size: int | None = None
    scale_precision: torch.dtype = torch.float32

    @property
    def bits(self) -> int:
        """Return the bits of an integer."""
        return int(self.dtype.removeprefix("int"))

    @property
    def qmin(self) -> int:
        """Return the least integer."""
        return -(2 ** (self.bits - 1))

    @property
    def qmax(self) -> int:
        """Return the greatest integer."""
        return 2 ** (self.bits - 1) - 1

    @property
    def is_symmetric(self) -> bool:
        """Return whether 0 stays 0, so that there is no zero point."""
        return self.mapping_type == "symmetric"

    def groups(self, features: int) -> int:
        """Return how many scales lie along a last dim of this size."""
        return 1 if self.group_size is None else features // self.group_size

    def grouped(self, call: Call, x, shape):
        """Return x (..., i) of `shape` such that one scale's elements fill the last dim: (..., groups, group_size), or
        as it is."""
        return (
            x
            if self.group_size is None
            else call(aten.view.default, x, [*shape[:-1], self.groups(shape[-1]), self.group_size])
        )

    def range_of(self, call: Call, x, dtype: torch.dtype):
        """Return (low, high) of values x (..., i), grouped already, that share a scale: (..., 1) in the type `dtype`.
        On a symmetric grid it is (None, high), how far they reach."""
        if self.is_symmetric:
            return None, call(aten.to.dtype, call(aten.amax.default, call(aten.abs.default, x), [-1], True), dtype)
        return limits(call, x, [-1], True, dtype)

    def qparams(self, call: Call, low, high):
        """Return (scale, zero_point) for a range; the zero point is None on a symmetric grid. Both are of the precision
        of scales."""
        if low is not None:
            low, high = call(aten.clamp_max.default, low, 0.0), call(aten.clamp_min.default, high, 0.0)
        if self.is_symmetric:
            reach = high if low is None else call(aten.maximum.default, call(aten.neg.default, low), high)
            return self._scale(call, reach, (self.qmax - self.qmin) / 2), None
        scale = self._scale(call, call(aten.sub.Tensor, high, low), self.qmax - self.qmin)
        steps = call(aten.round.default, call(aten.div.Tensor, low, scale))
        zero_point = call(aten.clamp.default, call(aten.rsub.Scalar, steps, self.qmin), self.qmin, self.qmax)
        return scale, call(aten.to.dtype, zero_point, self.scale_precision)

    def _scale(self, call: Call, width, steps: float):
        scale = call(aten.clamp_min.default, call(aten.div.Tensor, width, steps), LEAST)
        return call(aten.to.dtype, scale, self.scale_precision)

    def qparams_of(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (scale, zero_point) of the values of a tensor, along its last dim: (..., i) -> (..., groups)."""
        grouped = self.grouped(eager, x, x.shape)
        found = self.qparams(eager, *self.range_of(eager, grouped, at_least_float32(x.dtype)))
        return tuple(p.squeeze(-1) if p is not None and self.group_size is not None else p for p in found)

    def to_json(self) -> dict:
        """Return the fields as a dict of what JSON can hold."""
        return asdict(self) | {"scale_precision": str(self.scale_precision).removeprefix("torch.")}

    @staticmethod
    def from_json(fields: dict) -> Grid:
        """Return the grid that `to_json` wrote. Raises KeyError, TypeError or AttributeError for other values."""
        grid = Grid(**fields)
        return replace(grid, scale_precision=getattr(torch, grid.scale_precision))
