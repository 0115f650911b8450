"""Fake quantization: which layers train as if their weights and inputs were small integers, in the words of torchao.

Training rounds weights, and the inputs of linear layers if asked, to a grid (see grid.py) and goes on in floating
point, so that the model learns to live with the rounding (quantization-aware training, arXiv 1712.05877);
`autopar.convert` then stores the integers. Of a module M there may be added

    M.weight_fake_quantizer.scale          (o, groups), a trained scale (LSQ, arXiv 1902.08153); of a stack of
                                           experts M.P it is M.P_fake_quantizer.scale (experts, o, groups)
    M.activation_fake_quantizer.min_val    (), the range of inputs that an observer has seen; infinite before any
    M.activation_fake_quantizer.max_val    ()

Observers run where M.activation_fake_quantizer is in train mode.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import AdaptError, nearest
from .attach import Attachment, marked
from .grid import DTYPES, MAPPINGS, Grid, at_least_float32
from .parse import parse
from .targets import (
    ALL_LINEAR,
    Targets,
    check_targets,
    checked_kind,
    chosen,
    chosen_parameters,
    is_conv1d,
    is_number,
    listed,
)

SITES = "fake_quant_sites"  # attribute of a quantized module
OBSERVER = "activation_fake_quantizer"
STACK = "stack"  # kind of a site
LOW, HIGH = f"{OBSERVER}.min_val", f"{OBSERVER}.max_val"
OBSERVERS = ("moving_average_minmax", "minmax", "frozen")
# Accepted values of the fields that have a few.
CHOICES = {
    "granularity": ("per_channel", "per_group"), "mapping_type": MAPPINGS, "activations": (None, *DTYPES),
    "activation_granularity": ("per_token", "per_tensor"), "activation_mapping_type": MAPPINGS, "observer": OBSERVERS,
    "scale_precision": (torch.float32, torch.bfloat16), "range_learning": (False, True),
}  # fmt: skip


@dataclass(frozen=True)
class FakeQuant:
    """Quantization-aware training for `autopar.compile(..., adapt=[FakeQuant("int4", group_size=32,
    activations="int8")])`.

    dtype: of the weights, "int2" to "int8" (or torch.int8); granularity: "per_channel", a scale for each row (also
    "per_row" or "per_axis"), or "per_group", one for each `group_size` elements of it, which alone says the same.
    mapping_type: "symmetric", or "asymmetric" with a zero point. scale_precision: type of the scales, torch.float32 or
    torch.bfloat16. range_learning: scales are trained (LSQ) instead of following from the weights at every step.
    activations: dtype of the inputs of linear layers, None to leave them. activation_granularity: "per_token", scales
    follow from each token, or "per_tensor", from a range that an observer keeps in buffers: "moving_average_minmax"
    with the weight averaging_constant for the new, "minmax", or "frozen" for ranges that a checkpoint brings.
    activation_mapping_type as above. target_modules, exclude_modules: ends of module names, a regular expression for
    whole names, or "all-linear". target_parameters: ends of the names of stacks of experts (experts, o, i), or
    (experts, i, o) where their module is_transposed, whose weights alone are rounded. Raises AdaptError for values
    that mean nothing."""

    dtype: str = "int8"
    granularity: str | None = None
    group_size: int | None = None
    mapping_type: str = "symmetric"
    scale_precision: torch.dtype = torch.float32
    range_learning: bool = False
    activations: str | None = None
    activation_granularity: str = "per_token"
    activation_mapping_type: str = "asymmetric"
    observer: str = "moving_average_minmax"
    averaging_constant: float = 0.01
    target_modules: Targets = ALL_LINEAR
    exclude_modules: Targets = ()
    target_parameters: Sequence[str] = ()

    name = "fake_quant"

    def __post_init__(self):
        given = {"granularity": self.granularity or ("per_channel" if self.group_size is None else "per_group")}
        if given["granularity"] in ("per_row", "per_axis"):
            given["granularity"] = "per_channel"
        given |= {"dtype": _dtype_name(self.dtype), "activations": _dtype_name(self.activations)}
        for name, value in given.items():
            object.__setattr__(self, name, value)
        for name, allowed in (("dtype", DTYPES), *CHOICES.items()):
            value = getattr(self, name)
            if value not in allowed:
                raise AdaptError(
                    f"FakeQuant has {name}={value!r}", fix=f"one of {nearest(str(value), map(str, allowed))}"
                )
        size = self.group_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 2):
            raise AdaptError(
                f"FakeQuant has group_size={size!r}", fix="elements of a row that share a scale, 2 or more"
            )
        if (size is not None) != (self.granularity == "per_group"):
            raise AdaptError(
                f"FakeQuant has granularity={self.granularity!r} and group_size={size}", fix="give both, or neither"
            )
        if self.range_learning and self.mapping_type != "symmetric":
            raise AdaptError("range_learning has a trained scale and no zero point", fix='mapping_type="symmetric"')
        if not is_number(self.averaging_constant) or not 0 < self.averaging_constant <= 1:
            raise AdaptError(
                f"FakeQuant has averaging_constant={self.averaging_constant!r}", fix="a number from above 0 to 1"
            )
        object.__setattr__(self, "target_parameters", listed(self.target_parameters))
        check_targets("FakeQuant", self.target_modules, self.target_parameters)

    @staticmethod
    def parse(text: str) -> FakeQuant:
        """Read text such as "int8" or "int4,group_size=32,activations=int8": the dtype, then fields by name. Raises
        AdaptError for text that cannot be read."""
        return parse(FakeQuant, text, first="dtype")

    @property
    def weight_grid(self) -> Grid:
        """Return the grid that weights are rounded to."""
        return Grid(self.dtype, self.granularity, self.mapping_type, self.group_size, self.scale_precision)

    @property
    def activation_grid(self) -> Grid | None:
        """Return the grid of the inputs of linear layers, None if they are left as they are."""
        if self.activations is None:
            return None
        return Grid(
            self.activations, self.activation_granularity, self.activation_mapping_type, None, self.scale_precision
        )

    def attach(self, to: Attachment) -> None:
        """Mark the layers and add what is trained or observed. Raises AdaptError for targets that the model does not
        have, that are no linear layer, embedding or stack of experts, or whose rows are not whole groups."""
        if already := next((path for path, _, _ in sites_of(to.model)), None):
            raise AdaptError(f"{already} is fake-quantized already", fix="compile the model that it was attached to")
        for path, sites in self._sites(to.model).items():
            module = to.model.get_submodule(path)
            to.mark(module, SITES, sites)
            for site in sites:
                weight = module.get_parameter(site.parameter).detach()
                if self.range_learning:
                    to.add(path, site.scale, self._first_scale(f"{path}.{site.parameter}", site, weight, to))
                if site.observes:
                    dtype = at_least_float32(weight.dtype)
                    to.add_buffer(path, LOW, torch.full((), math.inf, dtype=dtype, device=to.device))
                    to.add_buffer(path, HIGH, torch.full((), -math.inf, dtype=dtype, device=to.device))

    def _sites(self, model: nn.Module) -> dict[str, tuple[QuantSite, ...]]:
        """Return what is quantized, by module."""
        layers = chosen(model, self.target_modules, self.exclude_modules) if self.target_modules else []
        if self.target_modules and not layers:
            raise AdaptError("the targets and exclude_modules leave no layer to quantize", fix="exclude fewer of them")
        found = {path: (self._layer(path, model.get_submodule(path)),) for path in layers}
        for path, leaf in chosen_parameters(model, self.target_parameters):
            found[path] = (*found.get(path, ()), self._stack(path, model.get_submodule(path), leaf))
        return found

    def _layer(self, path: str, module: nn.Module) -> QuantSite:
        fix = "name such layers in target_modules, or stacks of experts in target_parameters"
        kind = checked_kind(path, module, "fake-quantized", fix)
        return self._checked(path, QuantSite.of("weight", kind, is_conv1d(module), module.weight.shape, self))

    def _stack(self, path: str, module: nn.Module, leaf: str) -> QuantSite:
        shape, name = tuple(module.get_parameter(leaf).shape), f"{path}.{leaf}"
        if len(shape) != 3:
            fix = "name layers in target_modules, and stacks (experts, o, i) in target_parameters"
            raise AdaptError(f"{name} is no stack of matrices", shape=shape, fix=fix)
        is_transposed = bool(getattr(module, "is_transposed", False))
        return self._checked(name, QuantSite.of(leaf, STACK, is_transposed, shape, self))

    def _checked(self, name: str, site: QuantSite) -> QuantSite:
        """Raise AdaptError if the rows are not whole groups."""
        features = site.shape[-1]
        if self.group_size is not None and features % self.group_size:
            sizes = [n for n in range(2, features + 1) if features % n == 0]
            near = sorted(sizes, key=lambda n: abs(n - self.group_size))[:3]
            raise AdaptError(
                f"group_size={self.group_size} does not divide the {features} inputs of {name}",
                shape=site.shape,
                fix=f"one of {', '.join(map(str, sorted(near)))}, or leave the layer out by exclude_modules",
            )
        return site

    def _first_scale(self, path: str, site: QuantSite, weight: torch.Tensor, to: Attachment) -> torch.Tensor:
        """Return 2 mean(|w|) / sqrt(qmax), section 2.1 of arXiv 1902.08153: (o, groups), or (experts, o, groups)."""
        grid, (*rows, features) = self.weight_grid, site.shape
        if to.device.type == "meta":
            return torch.empty(*rows, grid.groups(features), dtype=self.scale_precision, device=to.device)
        if weight.is_meta or to.reads_files:
            raise AdaptError(
                f"{path} has no values yet from which its first scale follows",
                fix="compile a model with values, without weights=",
            )
        weight = weight.transpose(-2, -1) if site.is_transposed else weight
        grouped = weight.float().reshape(*rows, grid.groups(features), -1)
        scale = 2 * grouped.abs().mean(-1) / math.sqrt(grid.qmax)
        return scale.clamp_min(torch.finfo(torch.float32).eps).to(to.device, self.scale_precision)


@dataclass(frozen=True)
class QuantSite:
    """One fake-quantized parameter of a module. `kind`: "linear" or "embedding" of the weight of such a layer, STACK of
    stacked experts; `is_transposed`: it is (i, o), or (experts, i, o); `shape`: (o, i) or (experts, o, i)."""

    parameter: str
    kind: str
    is_transposed: bool
    shape: tuple[int, ...]
    config: FakeQuant

    @staticmethod
    def of(parameter: str, kind: str, is_transposed: bool, stored: Sequence[int], config: FakeQuant) -> QuantSite:
        """Return the site of a parameter that is `stored` in this shape."""
        *experts, rows, features = stored
        shape = (*experts, features, rows) if is_transposed else (*experts, rows, features)
        return QuantSite(parameter, kind, is_transposed, shape, config)

    @property
    def scale(self) -> str:
        """Return the name of a trained scale in the module."""
        return f"{self.parameter}_fake_quantizer.scale"

    @property
    def activation_grid(self) -> Grid | None:
        """Return the grid of the layer's inputs, None if they are left as they are."""
        return self.config.activation_grid if self.kind == "linear" else None

    @property
    def observes(self) -> bool:
        """Return whether the layer has a range of its inputs, which an observer keeps."""
        return self.activation_grid is not None and self.activation_grid.granularity == "per_tensor"

    @property
    def grad_factor(self) -> float:
        """Return the factor of a trained scale's gradient: 1 / sqrt(elements that share it * qmax), section 2.2 of
        arXiv 1902.08153."""
        grid = self.config.weight_grid
        return 1 / math.sqrt(self.shape[-1] // grid.groups(self.shape[-1]) * grid.qmax)


def sites_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, QuantSite]]:
    """Iterate over (path, module, site) of every fake-quantized parameter."""
    return marked(model, SITES)


def _dtype_name(dtype: object) -> object:
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
