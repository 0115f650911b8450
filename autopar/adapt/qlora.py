"""QLoRA: LoRA on a frozen base whose linear layers are kept in 4 or 8 bits (arXiv 2305.14314).

In the model that is compiled a quantized weight M.weight does not exist: it has M.weight_packed, M.weight_absmax and,
if its scales are quantized too, M.weight_absmax_scale and M.weight_absmax_offset, as autopar/ops/nf4.py says. They are
frozen parameters like any other: planned, sharded, gathered and saved in their few bits; where a layer computes, its
weight is dequantized."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from ..errors import AdaptError
from ..ops.nf4 import QUANT_TYPES, forms_of_parts, quantize, tile_of
from .attach import Attachment, marked
from .lora import LoRA
from .targets import ALL_LINEAR, Targets, all_linear, check_found, is_conv1d, layer_kind, listed, matches

SITES = "quantized_weights"  # attribute of a module
ENDS = {"packed": "packed", "absmax": "absmax", "scale": "absmax_scale", "offset": "absmax_offset"}  # of names
SMALLEST_BLOCK = 16


@dataclass(frozen=True)
class QuantizedWeight:
    """One quantized parameter of a module. Blocks run along its input dim, the last one, or the first if it
    `is_transposed`."""

    parameter: str
    is_transposed: bool
    quant_type: str
    block_size: int
    double_quant: bool

    @property
    def names(self) -> dict[str, str]:
        """Map each part to its name in the module, in the order of the arguments of autopar::dequantize."""
        parts = ENDS if self.double_quant else ("packed", "absmax")
        return {part: f"{self.parameter}_{ENDS[part]}" for part in parts}

    def forms(self, shape: Sequence[int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype by name, for a parameter of this shape."""
        shape = tuple(reversed(shape)) if self.is_transposed else shape
        forms = forms_of_parts(shape, self.quant_type, self.block_size, self.double_quant)
        return {name: forms[part] for part, name in self.names.items()}

    def compute(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Return the parts of a parameter, in the order of their names."""
        parts = quantize(
            weight.t() if self.is_transposed else weight, self.quant_type, self.block_size, self.double_quant
        )
        return tuple(parts[part] for part in self.names)


@dataclass(frozen=True)
class Quantization:
    """The base of QLoRA: which frozen weights are quantized, and how; see there."""

    quant_type: str
    double_quant: bool
    block_size: int
    modules: Targets
    parameters: Sequence[str]

    name = "quantize"

    def attach(self, to: Attachment) -> None:
        """Replace the targets by their quantized parts. Raises AdaptError for targets that the model does not have or
        that cannot be quantized."""
        shared = _shared(to.model)
        sites: dict[str, list[QuantizedWeight]] = {}
        for path, name, is_transposed in self._targets(to.model, shared):
            whole, parameter = f"{path}.{name}", getattr(to.model.get_submodule(path), name)
            if id(parameter) in shared:
                raise AdaptError(
                    f"{whole} is shared with another layer, which needs it", fix="leave it out of quantize_modules"
                )
            if parameter.requires_grad:
                raise AdaptError(
                    f"{whole} trains, and a quantized weight cannot", fix="leave it out of quantize_modules"
                )
            shape = tuple(reversed(parameter.shape)) if is_transposed else tuple(parameter.shape)
            block_size = self._block(whole, shape[-1])
            doubly = self.double_quant and tile_of(shape[-2], shape[-1] // block_size) != (
                1,
                1,
            )  # a step a scale saves nothing
            sites.setdefault(path, []).append(QuantizedWeight(name, is_transposed, self.quant_type, block_size, doubly))
        for path, found in sites.items():
            module = to.model.get_submodule(path)
            for site in found:
                to.replace(path, site.parameter, site.forms(getattr(module, site.parameter).shape), site.compute)
            to.mark(module, SITES, tuple(found))

    def _targets(self, model: nn.Module, shared: set[int]) -> Iterator[tuple[str, str, bool]]:
        """Yield (module, parameter, whether it is transposed) of every weight to quantize."""
        modules = {name: module for name, module in model.named_modules() if name}
        if self.modules == ALL_LINEAR:
            weights = {n: modules[n].weight for n in all_linear(model)}
            names = [
                n
                for n, w in weights.items()
                if not w.requires_grad and id(w) not in shared and not n.endswith("lm_head")
            ]
        else:
            check_found("module", self.modules, modules)
            names = [n for n in modules if matches(self.modules, n)]
        if not names and not self.parameters:
            raise AdaptError("the model has no frozen linear layer to quantize", fix="name layers in quantize_modules")
        for name in names:
            if layer_kind(modules[name]) != "linear":
                raise AdaptError(
                    f"{name} is a {type(modules[name]).__name__}, and linear layers and Conv1D are quantized",
                    fix="leave it out of quantize_modules, or name a matrix of it in quantize_parameters",
                )
            yield name, "weight", is_conv1d(modules[name])
        held = ((path, leaf, p) for path, m in modules.items() for leaf, p in m._parameters.items() if p is not None)
        held = {f"{path}.{leaf}": (path, leaf, p) for path, leaf, p in held}
        check_found("parameter", list(self.parameters), held)
        for whole, (path, leaf, parameter) in held.items():
            if matches(list(self.parameters), whole) and not (leaf == "weight" and path in names):
                if parameter.dim() not in (2, 3):
                    raise AdaptError(
                        f"{whole} is no matrix and no stack of them", shape=tuple(parameter.shape), fix="leave it out"
                    )
                yield path, leaf, False

    def _block(self, whole: str, columns: int) -> int:
        """Return the block size, or the largest even number below it that divides the input dim."""
        fitting = (b for b in range(self.block_size, SMALLEST_BLOCK - 1, -1) if columns % b == 0 and b % 2 == 0)
        if (block := next(fitting, None)) is None:
            raise AdaptError(
                f"{whole} has {columns} inputs, which no even block of {SMALLEST_BLOCK} to {self.block_size} divides",
                fix="leave it out: name the layers to quantize in quantize_modules",
            )
        return block


@dataclass(frozen=True)
class QLoRA(LoRA):
    """Low-rank adapters on a quantized base, for `autopar.compile(..., adapt=[QLoRA(r=16, lora_alpha=32)])`.

    The arguments of LoRA, of which target_modules is "all-linear" if not given, and: quant_type "nf4", "fp4" or "int8";
    block_size: weights of a row that share a scale (a dim that it does not divide gets the largest even divisor below,
    not under 16); double_quant: the scales are kept in 8 bits; quantize_modules: layers to quantize, as target_modules,
    "all-linear" being all frozen ones but the output head; quantize_parameters: ends of names of matrices, or stacks of
    them, with blocks along the last dim. Weights are quantized where the model is taken over, from the values it has or
    from `weights=`, whole, one at a time. An adapter starts and is saved as LoRA's; DoRA's lengths are those of the
    weights before they are quantized. Raises AdaptError for values that mean nothing."""

    target_modules: Targets = ALL_LINEAR
    quant_type: str = "nf4"
    double_quant: bool = True
    block_size: int = 64
    quantize_modules: Targets = ALL_LINEAR
    quantize_parameters: Sequence[str] = ()

    name = "qlora"

    def __post_init__(self):
        object.__setattr__(self, "target_modules", self.target_modules or ALL_LINEAR)
        object.__setattr__(self, "quantize_modules", self.quantize_modules or ())
        object.__setattr__(self, "quantize_parameters", listed(self.quantize_parameters))
        super().__post_init__()
        if self.quant_type not in QUANT_TYPES:
            raise AdaptError(f"QLoRA has quant_type={self.quant_type!r}", fix=f"one of {', '.join(QUANT_TYPES)}")
        if not isinstance(self.block_size, int) or self.block_size < SMALLEST_BLOCK or self.block_size % 2:
            raise AdaptError(
                f"QLoRA has block_size={self.block_size!r}", fix=f"an even number from {SMALLEST_BLOCK} on"
            )

    @property
    def parts(self) -> tuple[LoRA, Quantization]:
        """Return the two adaptations that this one is made of: the adapters, and the base under them."""
        lora = LoRA(**{f.name: getattr(self, f.name) for f in fields(LoRA)})
        modules, parameters = self.quantize_modules, self.quantize_parameters
        return lora, Quantization(self.quant_type, self.double_quant, self.block_size, modules, parameters)


def quantized_weights(model: nn.Module) -> Iterator[tuple[str, QuantizedWeight]]:
    """Iterate over (path of the module, weight) of every quantized parameter."""
    return ((path, weight) for path, _, weight in marked(model, SITES))


def _shared(model: nn.Module) -> set[int]:
    """Return the identities of the parameters that several modules hold."""
    held = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    return {key for key, count in held.items() if count > 1}
