"""Layers and stacks of experts that store their weights as integers, with torch alone: what `autopar.convert` makes of
fake-quantized ones.

A weight of at most 4 bits is stored two values a byte, the first of them in the lower half and both plus 8, rows of odd
length with a zero behind. The forward computes in floating point with the values that the integers stand for, and
rounds the inputs to their grid as training did; so its outputs are those of the fake-quantized layer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops.fake_quant import dequantized, fake_quantized, rounded
from .grid import Grid, eager


def pack(q: Tensor) -> Tensor:
    """Pack integers from -8 to 7 (..., i) into bytes (..., ceil(i / 2))."""
    q = nn.functional.pad(q, (0, q.shape[-1] % 2)).to(torch.int16) + 8
    return (q[..., 0::2] + 16 * q[..., 1::2]).to(torch.uint8)


def unpack(packed: Tensor, count: int) -> Tensor:
    """Return the first `count` integers of every row: (..., ceil(count / 2)) -> (..., count), int8."""
    halves = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    return halves[..., :count].to(torch.int8) - 8


class QuantizedWeight(nn.Module):
    """A weight (o, i), or a stack (experts, o, i), as buffers: `weight` of integers, int8 (..., o, i) or bytes (..., o,
    ceil(i / 2)); `scale` (..., o, groups); `zero_point` (..., o, groups) of int8, None on a symmetric grid. `dtype`: of
    the values that they stand for."""

    weight: Tensor
    scale: Tensor
    zero_point: Tensor | None
    dtype: torch.dtype

    def __init__(self, shape: tuple[int, ...], grid: Grid, dtype: torch.dtype, device=None):
        super().__init__()
        (*rows, features), self.grid, self.dtype = shape, grid, dtype
        self.features, self.is_packed = features, grid.bits <= 4
        width, stored = ((features + 1) // 2, torch.uint8) if self.is_packed else (features, torch.int8)
        self.register_buffer("weight", torch.zeros(*rows, width, dtype=stored, device=device))
        self.register_buffer(
            "scale", torch.ones(*rows, grid.groups(features), dtype=grid.scale_precision, device=device)
        )
        zero_point = None if grid.is_symmetric else torch.zeros_like(self.scale, dtype=torch.int8)
        self.register_buffer("zero_point", zero_point)

    @torch.no_grad()
    def store(self, weight: Tensor, scale: Tensor | None = None) -> None:
        """Round a weight (..., o, i) to the grid; the scales (..., o, groups) follow from it if they are not given."""
        found, zero_point = self.grid.qparams_of(weight) if scale is None else (scale, None)
        self.scale.copy_(found)
        if zero_point is not None:
            self.zero_point.copy_(zero_point)
        q = (
            rounded(self._grouped(weight), *self._qparams())
            .clamp(self.grid.qmin, self.grid.qmax)
            .view(weight.shape)
            .to(torch.int8)
        )
        self.weight.copy_(pack(q) if self.is_packed else q)

    def _grouped(self, x: Tensor) -> Tensor:
        return self.grid.grouped(eager, x, x.shape)

    def _qparams(self, rows: Tensor | slice = slice(None)) -> tuple[Tensor, Tensor | None]:
        """Return (scale, zero_point) of rows, in a shape that broadcasts against their groups."""
        found = (self.scale, self.zero_point if self.zero_point is None else self.zero_point.to(self.scale.dtype))
        return tuple(
            p if p is None else p[rows].unsqueeze(-1) if self.grid.group_size is not None else p[rows] for p in found
        )

    def dequantize(self, rows: Tensor | slice = slice(None)) -> Tensor:
        """Return the values of some rows: (..., i)."""
        stored = self.weight[rows]
        q = unpack(stored, self.features) if self.is_packed else stored
        wide = torch.promote_types(self.dtype, self.scale.dtype)
        values = dequantized(self._grouped(q).to(wide), *self._qparams(rows))
        return values.reshape(q.shape).to(self.dtype)

    def extra_repr(self) -> str:
        """Return the sizes and the grid, as `print(model)` shows them."""
        grid = self.grid
        group = f", group_size={grid.group_size}" if grid.group_size is not None else ""
        rows = ", ".join(map(str, self.weight.shape[:-1]))
        return f"{rows}, {self.features}, {grid.dtype} {grid.granularity}{group}, {grid.mapping_type}"


class QuantizedEmbedding(QuantizedWeight):
    """(...) indices -> (..., i)."""

    def forward(self, index: Tensor) -> Tensor:
        """Return the dequantized rows of an index (...) -> (..., features)."""
        return self.dequantize(index)


class QuantizedStack(QuantizedWeight):
    """A stack of experts, which their module reads as the parameter that it was. `is_transposed`: as (experts, i,
    o)."""

    def __init__(self, shape: tuple[int, ...], grid: Grid, dtype: torch.dtype, is_transposed: bool, device=None):
        super().__init__(shape, grid, dtype, device)
        self.is_transposed = is_transposed

    def forward(self) -> Tensor:
        """Return the dequantized stack."""
        values = self.dequantize()
        return values.transpose(-2, -1) if self.is_transposed else values

    def stand_for(self, module: nn.Module, name: str) -> None:
        """Take the place of parameter `name` of a module of experts, whose class reads the stack from then on."""
        held, cls = stack_name(name), type(module)
        del module._parameters[name]
        module.add_module(held, self)
        read = property(lambda owner: getattr(owner, held)())
        module.__class__ = type(cls.__name__, (cls,), {name: read, "__module__": cls.__module__})


def stack_name(parameter: str) -> str:
    """Return the name of the module that stands for a stack of experts."""
    return f"{parameter}_quantized"


class QuantizedLinear(QuantizedWeight):
    """(..., i) -> (..., o). `bias` (o) or None; on a static grid of the inputs also the buffers `activation_scale` ()
    and `activation_zero_point` () or None."""

    def __init__(
        self,
        shape: tuple[int, int],
        grid: Grid,
        dtype: torch.dtype,
        activation_grid: Grid | None = None,
        bias: bool = True,
        device=None,
    ):
        super().__init__(shape, grid, dtype, device)
        self.activation_grid = activation_grid
        self.bias = nn.Parameter(torch.zeros(shape[0], dtype=dtype, device=device)) if bias else None
        is_static = activation_grid is not None and activation_grid.granularity == "per_tensor"
        scale = torch.ones((), dtype=activation_grid.scale_precision, device=device) if is_static else None
        self.register_buffer("activation_scale", scale)
        has_zero = is_static and not activation_grid.is_symmetric
        self.register_buffer(
            "activation_zero_point", torch.zeros((), dtype=torch.int8, device=device) if has_zero else None
        )

    @torch.no_grad()
    def store_range(self, low: Tensor, high: Tensor) -> None:
        """Store the scale and the zero point that follow from the range () of the inputs."""
        scale, zero_point = self.activation_grid.qparams(eager, low, high)
        self.activation_scale.copy_(scale)
        if zero_point is not None:
            self.activation_zero_point.copy_(zero_point)

    def _input(self, x: Tensor) -> Tensor:
        grid, scale, zero_point = self.activation_grid, self.activation_scale, self.activation_zero_point
        if grid is None:
            return x
        if scale is None:
            scale, zero_point = grid.qparams_of(x)
        return fake_quantized(
            x, scale, zero_point if zero_point is None else zero_point.to(scale.dtype), grid.qmin, grid.qmax
        )

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x (..., in) by the dequantized weight -> (..., out)."""
        return nn.functional.linear(self._input(x), self.dequantize(), self.bias)
