"""Models in FP8 in eager torch, each quantization written out by hand: what the pass is compared with."""

from __future__ import annotations

import copy
from types import MethodType

import torch
from torch import nn

from autopar.adapt.fp8 import sites_of
from autopar.adapt.targets import is_conv1d

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def eager_fp8(model: nn.Module) -> nn.Module:
    """A copy of a model that FP8 is attached to whose marked layers multiply rounded numbers."""
    model = copy.deepcopy(model)
    for _, layer, site in sites_of(model):
        layer.fp8_recipe = site.recipe
        layer.forward = MethodType(_forward, layer)
    return model


def _forward(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    weight = layer.weight.t() if is_conv1d(layer) else layer.weight
    y = _Linear.apply(x, weight, layer.fp8_recipe)
    return y if layer.bias is None else y + layer.bias


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, recipe):
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        return _rounded(x, recipe, 1, 128) @ _rounded(weight, recipe, 128, 128).t()

    @staticmethod
    def backward(ctx, grad):
        (x, weight), recipe = ctx.saved_tensors, ctx.recipe
        kind = E4M3 if recipe == "block" else E5M2
        dx = _rounded(grad, recipe, 1, 128, kind) @ _rounded(weight, recipe, 128, 128)
        columns = _rounded(grad, recipe, 128, 1, kind), _rounded(x, recipe, 128, 1)
        a, b = (t.reshape(-1, t.shape[-1]) for t in columns)
        return dx, a.t() @ b, None


def _rounded(x: torch.Tensor, recipe: str, down: int, across: int, kind: torch.dtype = E4M3) -> torch.Tensor:
    """Round x to 8 bits and back, with a scale for all of it, or for each block of the last two dims."""
    if recipe == "tensor":
        return _rounded_alike(x, kind)
    result = torch.empty_like(x)
    for i in range(0, x.shape[-2], down):
        for j in range(0, x.shape[-1], across):
            block = (..., slice(i, i + down), slice(j, j + across))
            stacked = x[block].flatten(0, -3) if x.dim() > 2 else x[block].unsqueeze(0)
            result[block] = torch.stack([_rounded_alike(b, kind) for b in stacked]).view(x[block].shape)
    return result


def _rounded_alike(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    scale = (torch.finfo(kind).max / x.abs().max().double().clamp_min(1e-12)).float()
    return (x * scale).to(kind).to(x.dtype) * (1 / scale)
