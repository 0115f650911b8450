"""Training flags: which modules of a model are in train mode and which in eval mode; and whether its adapters take
part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter

from torch import nn

_training = attrgetter("training")


class Modes:
    """The flags of the modules of `source`, which the compiled module shares."""

    def __init__(self, source: nn.Module):
        self.names = [name for name, _ in source.named_modules(remove_duplicate=False)]
        self.modules = [source.get_submodule(name) for name in self.names]
        self.adapters = True

    def now(self) -> list[bool]:
        """Return one flag a module, True in train mode, and one for the adapters."""
        return [*map(_training, self.modules), self.adapters]

    def set_adapters(self, adapters: bool) -> None:
        """Set whether the adapters take part."""
        self.adapters = adapters

    @contextmanager
    def set_to(self, flags: list[bool]) -> Iterator[None]:
        """Give the modules these flags inside (see `now`; the one for the adapters changes nothing)."""
        before = self.now()
        try:
            for flag, module in zip(flags, self.modules):
                module.training = flag
            yield
        finally:
            for flag, module in zip(before, self.modules):
                module.training = flag

    def text(self) -> str:
        """Return the modes as `train`, `eval`, or `train, norm eval` where a module's mode is not that of the module
        around it."""
        flags = dict(zip(self.names, self.now()))
        words = ["train" if flags[""] else "eval"]
        for name, flag in flags.items():
            if name and flag != flags[name.rpartition(".")[0]]:
                words.append(f"{name} {'train' if flag else 'eval'}")
        return ", ".join(words + ([] if self.adapters else ["without adapters"]))
