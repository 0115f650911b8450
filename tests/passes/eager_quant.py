"""Fake-quantized models in eager torch, with torch's own kernels and observers: what the pass is compared with."""

from __future__ import annotations

import copy
import math
import re
from types import MethodType

import torch
from torch import nn
from torch.ao.quantization import MinMaxObserver, MovingAverageMinMaxObserver
from torch.nn.utils.parametrize import register_parametrization

from autopar.adapt.fake_quant import HIGH, LOW, STACK, QuantSite, sites_of


def eager_quantized(model: nn.Module) -> nn.Module:
    """A copy of a model that FakeQuant is attached to whose marked linear layers, and stacks of experts, compute
    fake-quantized."""
    model = copy.deepcopy(model)
    for _, layer, site in list(sites_of(model)):
        scale = dict(layer.named_parameters()).get(site.scale)
        if site.kind == STACK:
            register_parametrization(layer, site.parameter, Stack(site, scale))
            continue
        layer.site, layer.__dict__["weight_scale"] = site, scale  # no second name of it
        config = site.config
        if site.observes:
            kind = MinMaxObserver if config.observer == "minmax" else MovingAverageMinMaxObserver
            options = {} if config.observer == "minmax" else {"averaging_constant": config.averaging_constant}
            layer.observer = kind(dtype=torch.qint8, **options).to(layer.weight.dtype)
        layer.forward = MethodType(_forward, layer)
    return model


class Stack(nn.Module):
    """The weight of each expert by itself, rounded by torch's op."""

    def __init__(self, site: QuantSite, scale: torch.Tensor | None):
        super().__init__()
        self.site, self.__dict__["weight_scale"] = site, scale

    def forward(self, stored: torch.Tensor) -> torch.Tensor:
        experts = stored.transpose(1, 2) if self.site.is_transposed else stored
        scales = [None] * len(experts) if self.weight_scale is None else self.weight_scale
        rounded = torch.stack([_weight(self.site, scale, weight) for scale, weight in zip(scales, experts)])
        return rounded.transpose(1, 2) if self.site.is_transposed else rounded


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients of a model of `eager_quantized`, by the names of the one that it was made of."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {re.sub(r"parametrizations\.(\w+)\.original$", r"\1", name): grad for name, grad in found.items()}


def observed(model: nn.Module) -> dict[str, torch.Tensor]:
    """The ranges that its observers have seen, under the names of the buffers that the attachment adds."""
    found = {}
    for path, layer, site in sites_of(model):
        if site.observes:
            found |= {f"{path}.{LOW}": layer.observer.min_val, f"{path}.{HIGH}": layer.observer.max_val}
    return found


def _forward(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    weight = layer.weight.t() if layer.site.is_transposed else layer.weight
    return nn.functional.linear(_input(layer, x), _weight(layer.site, layer.weight_scale, weight), layer.bias)


def _weight(site: QuantSite, scale: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
    grid = site.config.weight_grid
    rows = weight.reshape(-1, grid.group_size or weight.shape[1])
    if scale is not None:
        scale = scale.view(-1)
        zeros, factor = torch.zeros_like(scale), 1 / math.sqrt(rows.shape[1] * grid.qmax)
        if scale.dtype is torch.float64:
            return _learned(rows, scale[:, None], grid, factor).view(weight.shape)
        rows = torch._fake_quantize_learnable_per_channel_affine(rows, scale, zeros, 0, grid.qmin, grid.qmax, factor)
    else:
        rows = _by_rows(rows, grid)
    return rows.view(weight.shape)


def _learned(x: torch.Tensor, scale: torch.Tensor, grid, factor: float) -> torch.Tensor:
    """Round as torch's op does, which takes no float64: section 2 of arXiv 1902.08153 as autograd has it."""
    scale = factor * scale + ((1 - factor) * scale).detach()
    q = torch.round(x / scale).detach()
    inside = (q >= grid.qmin) & (q <= grid.qmax)
    v = torch.where(inside, x / scale, q.clamp(grid.qmin, grid.qmax))
    return (v + (v.round() - v).detach()) * scale


def _input(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    grid = layer.site.activation_grid
    if grid is None:
        return x
    if not layer.site.observes:
        return _by_rows(x.reshape(-1, x.shape[-1]), grid).view(x.shape)
    if layer.training:
        layer.observer(x.detach())
    scale, zero_point = _qparams(layer.observer.min_val, layer.observer.max_val, grid)
    return torch.fake_quantize_per_tensor_affine(x, scale, zero_point, grid.qmin, grid.qmax)


def _by_rows(rows: torch.Tensor, grid) -> torch.Tensor:
    scale, zero_point = _qparams(rows.detach().amin(1), rows.detach().amax(1), grid)
    return torch.fake_quantize_per_channel_affine(rows, scale, zero_point, 0, grid.qmin, grid.qmax)


def _qparams(low: torch.Tensor, high: torch.Tensor, grid) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = low.clamp(max=0), high.clamp(min=0)
    if grid.is_symmetric:
        scale = torch.maximum(-low, high) * 2 / (grid.qmax - grid.qmin)
        return scale.float(), torch.zeros_like(scale, dtype=torch.int32)
    scale = ((high - low) / (grid.qmax - grid.qmin)).float()
    return scale, (grid.qmin - torch.round(low / scale)).clamp(grid.qmin, grid.qmax).to(torch.int32)
