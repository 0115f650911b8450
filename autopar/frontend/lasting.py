"""Remove what the first forward of a transformers model leaves for good: hooks that collect hidden states for its
outputs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

INSTALLED = "_output_capturing_hooks_installed"
INSTALLER = "transformers.utils.output_capturing", "maybe_install_capturing_hooks"
TABLES = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


def names(model: nn.Module) -> list[str]:
    """Return the names of the modules that have their hooks."""
    return [name for name, module in model.named_modules() if vars(module).get(INSTALLED)]


def install(model: nn.Module, wanted: list[str]) -> None:
    """Give these modules their hooks, as their first forward would."""
    for name in wanted:
        module = model.get_submodule(name)
        if not vars(module).get(INSTALLED):
            getattr(sys.modules[INSTALLER[0]], INSTALLER[1])(module)


@contextmanager
def removed_again(model: nn.Module) -> Iterator[None]:
    """Inside, the first forward of a model that lacks some of its blocks may give it these hooks, which are taken away
    at the end: its next forward gives them to all blocks."""
    before = set(names(model))
    tables = [table for module in model.modules() for table in map(vars(module).get, TABLES) if table is not None]
    hooks = [set(table) for table in tables]
    try:
        yield
    finally:
        new = [name for name in names(model) if name not in before]
        for name in new:
            delattr(model.get_submodule(name), INSTALLED)
        for table, known in zip(tables, hooks) if new else ():
            for key in set(table) - known:
                del table[key]
