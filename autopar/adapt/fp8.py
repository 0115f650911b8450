"""Training in FP8: which linear layers multiply 8-bit floats, and how those are scaled (autopar/ops/fp8_linear.py).

Weights, their gradients and the optimizer's state stay what they are; activations, weights and gradients of outputs are
quantized in front of every product of a layer, with scales that follow from their own values.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from ..errors import AdaptError, nearest
from ..ops.fp8 import BLOCK
from ..ops.fp8_linear import ALIGNED, RECIPES
from .attach import Attachment, marked
from .parse import parse
from .targets import ALL_LINEAR, Targets, check_targets, chosen, is_conv1d, layer_kind

SITES = "fp8_sites"  # attribute of a layer that computes in FP8
HEADS = ("lm_head", "head")  # last layers by name, of models that do not say which is theirs
AUTO = "auto"  # the recipe and the layers that the planner finds fastest
NONE = "none"  # if that is no layer
MULTIPLES = {"block": BLOCK, "tensor": ALIGNED}  # of inputs and outputs that a recipe takes
_log = logging.getLogger("autopar")


@dataclass(frozen=True)
class FP8:
    """FP8 training for `autopar.compile(..., adapt=[FP8("block")])`.

    recipe: "block", a scale for each 128 x 128 numbers of a weight and 1 x 128 of an activation, "tensor", one for all
    of a tensor, or "auto", the recipe and the kinds of layers with which `autopar.plan` and `compile` find a step
    fastest, if any is faster than the model's own precision. target_modules, exclude_modules: ends of module names, a
    regular expression for whole names, or "all-linear", all linear layers but the head. Inputs and outputs of a layer
    must be multiples of 128 ("block") or 16 ("tensor"): "all-linear" leaves other layers in their own precision and
    logs which. Raises AdaptError for values that mean nothing."""

    recipe: str = "block"
    target_modules: Targets = ALL_LINEAR
    exclude_modules: Targets = ()

    name = "fp8"

    def __post_init__(self):
        if self.recipe not in (*RECIPES, AUTO):
            raise AdaptError(
                f"FP8 has recipe={self.recipe!r}", fix=f"one of {nearest(str(self.recipe), (*RECIPES, AUTO))}"
            )
        check_targets("FP8", self.target_modules)

    @staticmethod
    def parse(text: str) -> FP8:
        """Read text such as "block" or "tensor,exclude_modules=o_proj": the recipe, then fields by name. Raises
        AdaptError for text that cannot be read."""
        return parse(FP8, text, first="recipe")

    @property
    def text(self) -> str:
        """Return the text that `parse` reads as this."""
        found = [self.recipe]
        for name in ("target_modules", "exclude_modules"):
            names = getattr(self, name)
            if names and names != ALL_LINEAR:
                found.append(f"{name}={names if isinstance(names, str) else '+'.join(names)}")
        return ",".join(found)

    def attach(self, to: Attachment) -> None:
        """Mark the layers. Raises AdaptError for targets that the model does not have, that are no linear layer, or
        whose sizes the recipe does not take."""
        if already := next((path for path, _, _ in sites_of(to.model)), None):
            raise AdaptError(f"{already} computes in FP8 already", fix="compile the model that it was attached to")
        if self.recipe == AUTO:
            raise AdaptError(
                'FP8("auto") is for autopar.plan and compile, which choose',
                fix='give FP8("block") or FP8("tensor") here',
            )
        found = chosen(to.model, self.target_modules, self.exclude_modules)
        if self.target_modules == ALL_LINEAR:
            found = [path for path in found if path.rpartition(".")[2] not in HEADS]
        shapes = {path: _shape(path, to.model.get_submodule(path)) for path in found}
        unfit = {path: shape for path, shape in shapes.items() if any(n % MULTIPLES[self.recipe] for n in shape)}
        if unfit and (self.target_modules != ALL_LINEAR or len(unfit) == len(shapes)):
            raise self._refusal(*next(iter(unfit.items())))
        if not shapes:
            raise AdaptError("the targets and exclude_modules leave no layer", fix="exclude fewer of them")
        if unfit:
            _log.info("FP8 by %s leaves %d layers in their precision: %s", self.recipe, len(unfit), ", ".join(unfit))
        for path in (p for p in shapes if p not in unfit):
            to.mark(to.model.get_submodule(path), SITES, (self,))

    def _refusal(self, path: str, shape: tuple[int, int]) -> AdaptError:
        other = ', or FP8("tensor")' if self.recipe == "block" and not any(n % ALIGNED for n in shape) else ""
        return AdaptError(
            f"{path} has {shape[1]} inputs and {shape[0]} outputs, and FP8 by {self.recipe} takes multiples of "
            f"{MULTIPLES[self.recipe]}",
            shape=shape,
            fix=f"leave the layer out by exclude_modules{other}",
        )


def sites_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, FP8]]:
    """Iterate over (path, module, what it was asked for) of every layer that computes in FP8."""
    return marked(model, SITES)


def _shape(path: str, module: nn.Module) -> tuple[int, int]:
    """Return (outputs, inputs) of a linear layer. Raises AdaptError for another module."""
    if layer_kind(module) != "linear":
        raise AdaptError(
            f"{path} is a {type(module).__name__}, and linear layers and Conv1D compute in FP8",
            fix="name such layers in target_modules",
        )
    rows, columns = module.get_parameter("weight").shape
    return (columns, rows) if is_conv1d(module) else (rows, columns)
