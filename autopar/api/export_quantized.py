"""`autopar.convert`: a compiled model that was trained with fake quantization -> a plain module of really quantized
layers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ..adapt.fake_quant import HIGH, LOW, STACK, QuantSite, sites_of
from ..adapt.fake_quant import SITES as QUANT_SITES
from ..adapt.lora_site import SITES as LORA_SITES
from ..adapt.quantized_weight import QuantizedEmbedding, QuantizedLinear, QuantizedStack, QuantizedWeight
from ..adapt.targets import has_plain_forward
from ..errors import AdaptError
from ..processes import agree
from ..runtime.module import ParallelModule
from ..storage.model_folder import whole as gathered
from ..storage.quantized_folder import save_quantized


def convert(model: ParallelModule, folder: str | Path | None = None) -> nn.Module:
    """Return the model on one device, in eval mode, with integers for weights (see autopar/adapt/quantized_weight.py).
    It runs with torch alone; its outputs are those of the fake-quantized model in eval mode but for rounding. All ranks
    call this and each gets it whole; a quantized weight is gathered, rounded and let go before the next one. With
    `folder` rank 0 also writes it there, for `load_quantized`. The compiled model stays as it is.

    Raises AdaptError for a model compiled without FakeQuant, one whose LoRA adapters are not merged, and one with a
    layer that cannot be replaced or whose inputs no observer has seen."""
    found = sites_of(model._source) if isinstance(model, ParallelModule) else ()
    sites = {f"{path}.{site.parameter}": site for path, _, site in found}
    if not sites:
        raise AdaptError(
            "the model was compiled without FakeQuant", fix='compile it with adapt=[autopar.FakeQuant("int8")]'
        )
    if model._adapters is not None and not model._adapters.merged:
        raise AdaptError(
            "the model has LoRA adapters beside its layers", fix="merge_adapter() first: the sum is quantized"
        )
    buffers = _buffers(model)
    for path, layer, site in sites_of(model._source):
        _check(path, layer, site, buffers)
    plain = _without_adaptations(model, sites, buffers)
    if folder is not None:
        agree.from_rank_zero(lambda: save_quantized(plain, folder))
    return plain


def _buffers(model: ParallelModule) -> dict[str, Tensor]:
    """Return the buffers of all stages, by name. One that is not saved with the model has the value that it had in the
    source where another stage has it."""
    forms, here = model._forms, dict(model.named_buffers())
    saved = forms.saved_buffers
    return {n: gathered(model, n) if n in saved else here[n] if n in here else forms.left[n] for n in forms.buffers}


def _check(path: str, layer: nn.Module, site: QuantSite, buffers: Mapping[str, Tensor]) -> None:
    if site.kind != STACK and not has_plain_forward(layer):
        raise AdaptError(
            f"{path} is a {type(layer).__name__} with a forward of its own, which no quantized layer computes",
            fix="leave it out by exclude_modules",
        )
    if site.observes and not torch.isfinite(buffers[f"{path}.{HIGH}"]):
        raise AdaptError(f"the inputs of {path} were never observed", fix="call the model in train mode first")


def _without_adaptations(
    model: ParallelModule, sites: Mapping[str, QuantSite], buffers: Mapping[str, Tensor]
) -> nn.Module:
    """Copy the source with the compiled model's values and with quantized layers in place of those of `sites`, by name
    of the parameter."""
    forms, made, values = model._forms, {}, {}
    names: dict[str, list[str]] = {}
    for name, first in forms.all_names.items():
        names.setdefault(first, []).append(name)
    for name, form in forms.items():
        if name in model.adapter_names:
            values[name] = nn.Parameter(torch.empty(0))
            continue
        whole = gathered(model, name)
        quantized = [other for other in names[name] if other in sites]
        for other in quantized:
            made[other] = _quantized(model, other.rpartition(".")[0], sites[other], whole, buffers)
        value = whole.clone() if len(quantized) < len(names[name]) else whole.new_empty(0)
        values[name] = nn.Parameter(value, requires_grad=form.trainable)
    values |= {name: buffer.detach().clone() for name, buffer in buffers.items()}
    plain = forms.copy_of(model._source, values)
    for name, layer in made.items():
        path, _, leaf = name.rpartition(".")
        if isinstance(layer, QuantizedStack):
            layer.stand_for(plain.get_submodule(path), leaf)
            continue
        bias = getattr(plain.get_submodule(path), "bias", None)
        if bias is not None:
            layer.bias = bias
        plain.set_submodule(path, layer)
    for name in model.adapter_names:
        _drop(plain, name)
    for module in plain.modules():
        for mark in (QUANT_SITES, LORA_SITES):
            vars(module).pop(mark, None)
    return plain.eval()


def _quantized(
    model: ParallelModule, path: str, site: QuantSite, weight: Tensor, buffers: Mapping[str, Tensor]
) -> QuantizedWeight:
    config = site.config
    arguments = (site.shape, config.weight_grid, weight.dtype)
    layer: QuantizedWeight
    if site.kind == "embedding":
        layer = QuantizedEmbedding(*arguments, device=weight.device)
    elif site.kind == STACK:
        layer = QuantizedStack(*arguments, site.is_transposed, weight.device)
    else:
        has_bias = f"{path}.bias" in model._forms.all_names
        layer = QuantizedLinear(*arguments, site.activation_grid, has_bias, weight.device)
    scale = gathered(model, f"{path}.{site.scale}") if config.range_learning else None
    layer.store(weight.transpose(-2, -1) if site.is_transposed else weight, scale)
    if isinstance(layer, QuantizedLinear) and site.observes:
        layer.store_range(*(buffers[f"{path}.{name}"] for name in (LOW, HIGH)))
    return layer


def _drop(module: nn.Module, name: str) -> None:
    """Remove a parameter or buffer that was added, if it is still there, and the modules made for it that are empty
    then."""
    head, _, rest = name.partition(".")
    if not rest:
        module._parameters.pop(head, None)
        module._buffers.pop(head, None)
    elif head in module._modules:
        child = module._modules[head]
        _drop(child, rest)
        if type(child) is nn.Module and not (child._parameters or child._buffers or child._modules):
            del module._modules[head]
