"""Fake-quantized models in eager torch, with torch's own kernels and observers: what the pass is compared with."""

from __future__ import annotations

import copy
import math
from types import MethodType

import torch
from torch import nn
from torch.ao.quantization import MinMaxObserver, MovingAverageMinMaxObserver

from autopar.adapt.fake_quant import HIGH, LOW, SCALE, sites_of


def eager_quantized(model: nn.Module) -> nn.Module:
    """A copy of a model that FakeQuant is attached to whose marked linear layers compute fake-quantized."""
    model = copy.deepcopy(model)
    for _, layer, site in sites_of(model):
        layer.site, layer.__dict__["weight_scale"] = (
            site,
            dict(layer.named_parameters()).get(SCALE),
        )  # no second name of it
        config = site.config
        if site.observes:
            kind = MinMaxObserver if config.observer == "minmax" else MovingAverageMinMaxObserver
            options = {} if config.observer == "minmax" else {"averaging_constant": config.averaging_constant}
            layer.observer = kind(dtype=torch.qint8, **options).to(layer.weight.dtype)
        layer.forward = MethodType(_forward, layer)
    return model


def observed(model: nn.Module) -> dict[str, torch.Tensor]:
    """The ranges that its observers have seen, under the names of the buffers that the attachment adds."""
    found = {}
    for path, layer, site in sites_of(model):
        if site.observes:
            found |= {f"{path}.{LOW}": layer.observer.min_val, f"{path}.{HIGH}": layer.observer.max_val}
    return found


def _forward(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    weight = layer.weight.t() if layer.site.is_transposed else layer.weight
    return nn.functional.linear(_input(layer, x), _weight(layer, weight), layer.bias)


def _weight(layer: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    grid = layer.site.config.weight_grid
    rows = weight.reshape(-1, grid.group_size or weight.shape[1])
    if layer.weight_scale is not None:
        scale = layer.weight_scale.view(-1)
        zeros, factor = torch.zeros_like(scale), 1 / math.sqrt(rows.shape[1] * grid.qmax)
        rows = torch._fake_quantize_learnable_per_channel_affine(rows, scale, zeros, 0, grid.qmin, grid.qmax, factor)
    else:
        rows = _by_rows(rows, grid)
    return rows.view(weight.shape)


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
