"""LoRA: what to adapt and how, in PEFT's words, and the parameters that it adds.

A frozen weight W (o, i) gets a trained product of two thin matrices, y = W x + scaling * B A x with A (r, i) and B (o,
r) (arXiv 2106.09685); scaling is lora_alpha / r, or lora_alpha / sqrt(r) for rank-stabilized LoRA (arXiv 2312.03732).
DoRA (arXiv 2402.09353) trains the length of every row of W + scaling * B A besides. Names, shapes, starting values and
the meaning of every argument are those of PEFT's `LoraConfig`
(https://huggingface.co/docs/peft/package_reference/lora); what PEFT would do silently to a shared parameter, or what no
file of an adapter holds, is refused.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ..errors import AdaptError, nearest
from .attach import Attachment
from .lora_site import MAGNITUDE, SITES, LoraSite
from .targets import (
    ALL_LINEAR,
    Targets,
    check_found,
    check_targets,
    checked_kind,
    chosen,
    chosen_parameters,
    has_plain_forward,
    is_conv1d,
    is_number,
    listed,
    matches,
    number_in_list,
    pattern,
)

BIASES = ("none", "all", "lora_only")


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters for `autopar.compile(..., adapt=[LoRA(...)])`; everything else of the model is frozen.

    target_modules: ends of module names, a regular expression for whole names, or "all-linear"; target_parameters: ends
    of parameter names, for stacks of experts. bias: "none", "all" or "lora_only", which biases train too;
    modules_to_save: ends of names of modules that train as a whole and are saved with the adapter. rank_pattern,
    alpha_pattern: regular expression for the end of a module name -> its own r, lora_alpha. init_lora_weights: True (A
    uniform as Kaiming, B zero), "gaussian" (A normal of deviation 1 / r), or False (both random). Raises AdaptError for
    values that mean nothing."""

    r: int = 8
    lora_alpha: float = 8
    target_modules: Targets = ()
    lora_dropout: float = 0.0
    use_rslora: bool = False
    use_dora: bool = False
    bias: str = "none"
    exclude_modules: Targets = ()
    target_parameters: Sequence[str] = ()
    modules_to_save: Sequence[str] = ()
    layers_to_transform: Sequence[int] | int | None = None
    layers_pattern: Targets | None = None
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    init_lora_weights: bool | str = True

    name = "lora"

    def __post_init__(self):
        tidied = {name: listed(getattr(self, name)) for name in ("target_parameters", "modules_to_save")}
        tidied |= {name: getattr(self, name) or () for name in ("target_modules", "exclude_modules")}
        tidied |= {
            name: getattr(self, name) or {} for name in ("rank_pattern", "alpha_pattern")
        }  # None, as PEFT writes them
        for name, value in tidied.items():
            object.__setattr__(self, name, value)
        for text in (*self.rank_pattern, *self.alpha_pattern, *listed(self.layers_pattern)):
            pattern(text)
        for alpha in (self.lora_alpha, *self.alpha_pattern.values()):
            if not is_number(alpha) or alpha <= 0:
                raise AdaptError(f"LoRA has lora_alpha={alpha!r}", fix="a number above 0")
        for r in (self.r, *self.rank_pattern.values()):
            if isinstance(r, bool) or not isinstance(r, int) or r < 1:
                raise AdaptError(f"LoRA has r={r!r}", fix="r is the rank of the adapters, a whole number from 1 on")
        if not is_number(self.lora_dropout) or not 0 <= self.lora_dropout < 1:
            raise AdaptError(f"LoRA has lora_dropout={self.lora_dropout!r}", fix="a probability below 1")
        if self.bias not in BIASES:
            raise AdaptError(f"LoRA has bias={self.bias!r}", fix=f"one of {', '.join(BIASES)}")
        if self.init_lora_weights not in (True, False, "gaussian"):
            raise AdaptError(f"LoRA has init_lora_weights={self.init_lora_weights!r}", fix='True, False or "gaussian"')
        check_targets("LoRA", self.target_modules, self.target_parameters)
        if (
            self.layers_to_transform is not None
            and isinstance(self.target_modules, str)
            and self.target_modules != ALL_LINEAR
        ):
            raise AdaptError("layers_to_transform goes with a list of target_modules", fix="say them in the pattern")
        if self.target_parameters and (self.lora_dropout or self.use_dora):
            raise AdaptError("adapters of target_parameters have neither dropout nor DoRA", fix="leave both out")

    def scaling(self, module: str) -> tuple[int, float]:
        """Return (r, factor of the product) of the adapter of a module."""
        r, alpha = _own(self.rank_pattern, module, self.r), _own(self.alpha_pattern, module, self.lora_alpha)
        return r, alpha / (math.sqrt(r) if self.use_rslora else r)

    def attach(self, to: Attachment) -> None:
        """Add the adapters to a model and freeze the rest.

        Raises AdaptError for targets that the model does not have or that have no matrix, and for a rank above a
        matrix's."""
        model = to.model
        if self.use_dora and to.reads_files:
            raise AdaptError(
                "DoRA starts from the weights, and weights= comes later", fix="compile a model with values"
            )
        if already := next((n for n, _ in model.named_parameters() if "lora_" in n), None):
            raise AdaptError(
                f"the model has adapters already: {already}", fix="compile the model that they were added to"
            )
        found = self._sites(model)
        saved = [m for n, m in model.named_modules() if n and matches(list(self.modules_to_save), n)]
        check_found("module", list(self.modules_to_save), [n for n, _ in model.named_modules() if n])
        _check_saved(model, saved)
        trained = {id(p) for module in saved for p in module.parameters()} | {id(p) for p in self._biases(model, found)}
        for parameter in model.parameters():
            to.train(parameter, id(parameter) in trained)
        for path, sites in found.items():
            module = model.get_submodule(path)
            for site in sites:
                self._add(to, path, site, getattr(module, site.parameter))
            to.mark(module, SITES, sites)

    def _add(self, to: Attachment, path: str, site: LoraSite, weight: torch.Tensor) -> None:
        shapes, dtype = site.shapes(weight.shape), _adapter_dtype(weight.dtype)
        least = min(shapes[0][1], shapes[1][0])
        if site.r > least:
            raise AdaptError(
                f"r={site.r} is above the rank that {path}.{site.parameter} can have",
                shape=tuple(weight.shape),
                fix=f"r at most {least}, or another layer",
            )
        for name, shape, first in zip(site.names, shapes, (True, False)):
            values = torch.empty(shape, dtype=dtype, device=to.device)
            if to.device.type != "meta":
                self._start(values, site, first, _generator(to.seed, f"{path}.{name}"))
            to.add(path, name, values)
        if site.use_dora:
            rows = weight.t() if site.is_transposed else weight
            to.add(path, MAGNITUDE, _row_norms(rows, to.device).to(dtype))

    def _start(self, values: torch.Tensor, site: LoraSite, is_a: bool, generator: torch.Generator) -> None:
        is_zero_one = is_a if site.kind == "embedding" else not is_a
        if self.init_lora_weights is not False and is_zero_one:
            values.zero_()
        elif site.kind == "embedding":
            values.normal_(generator=generator)
        elif self.init_lora_weights == "gaussian":
            values.normal_(0.0, 1 / site.r, generator=generator)
        else:
            nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)

    def _sites(self, model: nn.Module) -> dict[str, tuple[LoraSite, ...]]:
        """Return the adapted parameters by module."""
        modules = {name: module for name, module in model.named_modules() if name}
        names = chosen(model, self.target_modules, self.exclude_modules) if self.target_modules else []
        found = {name: (self._site(name, modules[name]),) for name in self._in_layers(names)}
        if self.target_modules and not found:
            raise AdaptError(
                "exclude_modules and layers_to_transform leave no module to adapt", fix="give fewer of them"
            )
        for name, sites in self._parameter_sites(model):
            found[name] = (*found.get(name, ()), *sites)
        adapted = [*found, *(f"{name}.{site.parameter}" for name, sites in found.items() for site in sites)]
        for key in (*self.rank_pattern, *self.alpha_pattern):
            if not any(re.match(rf"(.*\.)?({key})$", name) for name in adapted):
                raise AdaptError(
                    f"nothing adapted is called {key!r}, as a pattern says", fix=f"such as {nearest(key, adapted)}"
                )
        return found

    def _in_layers(self, names: Sequence[str]) -> list[str]:
        """Return those names that layers_to_transform and modules_to_save leave."""
        names = [
            n for n in names if not any(re.match(rf"(^|.*\.){re.escape(m)}($|\..*)", n) for m in self.modules_to_save)
        ]
        if self.layers_to_transform is None:
            return names
        wanted = (
            [self.layers_to_transform] if isinstance(self.layers_to_transform, int) else list(self.layers_to_transform)
        )
        numbers = {name: number_in_list(name, self.layers_pattern) for name in names}
        if missing := [n for n in wanted if n not in numbers.values()]:
            raise AdaptError(
                f"no target lies in layer {missing[0]}", fix=f"layers of {sorted({*numbers.values()} - {None})}"
            )
        return [name for name in names if numbers[name] in wanted]

    def _site(self, name: str, module: nn.Module) -> LoraSite:
        fix = "name such layers in target_modules, or a parameter of two or three dims in target_parameters"
        kind = checked_kind(name, module, "what LoRA adapts", fix)
        if not has_plain_forward(module) and not hasattr(module, "embed_scale"):
            raise AdaptError(
                f"{name} is a {type(module).__name__} whose forward does more than the product that an adapter stands "
                f"beside",
                fix="leave it out by exclude_modules",
            )
        if self.use_dora and kind == "embedding":
            raise AdaptError(
                f"{name} is an embedding, and DoRA is for linear layers", fix="leave it out, or use_dora=False"
            )
        r, scaling = self.scaling(name)
        return LoraSite(
            "weight", kind, is_conv1d(module) or kind == "embedding", r, scaling, self.lora_dropout, self.use_dora
        )

    def _parameter_sites(self, model: nn.Module) -> Iterator[tuple[str, tuple[LoraSite, ...]]]:
        sites: dict[str, list[LoraSite]] = {}
        for path, leaf in chosen_parameters(model, self.target_parameters):
            module, full = model.get_submodule(path), f"{path}.{leaf}"
            shape = tuple(module.get_parameter(leaf).shape)
            if len(shape) not in (2, 3):
                raise AdaptError(f"{full} is no matrix and no stack of them", shape=shape, fix="target such parameters")
            is_transposed = len(shape) == 3 and bool(getattr(module, "is_transposed", False))
            r, scaling = self.scaling(full)
            sites.setdefault(path, []).append(LoraSite(leaf, "parameter", is_transposed, r, scaling, 0.0, False))
        for path, found in sites.items():  # PEFT wraps a module once a parameter: the last one is outermost
            yield path, tuple(_behind(site, len(found) - 1 - i) for i, site in enumerate(found))

    def _biases(self, model: nn.Module, found: Mapping[str, tuple[LoraSite, ...]]) -> list[nn.Parameter]:
        if self.bias == "all":
            return [p for name, p in model.named_parameters() if name.rpartition(".")[2] == "bias"]
        if self.bias == "lora_only":
            biases = [getattr(model.get_submodule(path), "bias", None) for path in found]
            return [b for b in biases if isinstance(b, nn.Parameter)]
        return []


def _check_saved(model: nn.Module, saved: Sequence[nn.Module]) -> None:
    """Raise AdaptError for modules_to_save that hold what an adapter's file has no place for."""
    inside = {id(module) for part in saved for module in part.modules()}
    outside = [(name, module) for name, module in model.named_modules() if id(module) not in inside]
    held = {id(p): name for name, module in outside for p in module._parameters.values() if p is not None}
    for part in saved:
        if shared := next((held[id(p)] for p in part.parameters() if id(p) in held), None):
            raise AdaptError(
                f"modules_to_save has a parameter of {shared} too, which would train as well", fix="leave it out"
            )
        if buffers := [name for name, _ in part.named_buffers()]:
            raise AdaptError(
                f"modules_to_save has buffers, which are not saved: {', '.join(buffers)}", fix="leave it out"
            )


def _own(patterns: Mapping[str, float], module: str, otherwise: float) -> float:
    return next((v for key, v in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), otherwise)


def _behind(site: LoraSite, wrappers: int) -> LoraSite:
    return LoraSite(**{**vars(site), "prefix": "base_layer." * wrappers})


def _adapter_dtype(base: torch.dtype) -> torch.dtype:
    """Return the type of adapters on a base of this type: those of a half-precision model train in float32, as PEFT's
    do."""
    return torch.float32 if base.itemsize < 4 else base


def _row_norms(weight: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "meta" or weight.is_meta:
        return torch.empty(weight.shape[0], device=device)
    return weight.detach().float().norm(dim=1).to(device)


def _generator(seed: int, name: str) -> torch.Generator:
    """Return a generator of its own for every tensor, so that what one draws does not depend on what others do."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))
