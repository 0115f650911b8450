"""Remove what the first forward of a transformers model leaves for good: hooks that collect hidden states for its
outputs."""

from __future__ import annotations

import sys

from torch import nn

INSTALLED = "_output_capturing_hooks_installed"
INSTALLER = "transformers.utils.output_capturing", "maybe_install_capturing_hooks"


def names(model: nn.Module) -> list[str]:
    """Return the names of the modules that have their hooks."""
    return [name for name, module in model.named_modules() if vars(module).get(INSTALLED)]


def install(model: nn.Module, wanted: list[str]) -> None:
    """Give these modules their hooks, as their first forward would."""
    for name in wanted:
        module = model.get_submodule(name)
        if not vars(module).get(INSTALLED):
            getattr(sys.modules[INSTALLER[0]], INSTALLER[1])(module)
