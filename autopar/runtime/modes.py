"""Training flags: which modules of a model are in train mode and which in eval mode; and whether its adapters take part.

Users set them on the compiled module; the source model, which is traced, follows when a call is compiled.
"""

from __future__ import annotations

from operator import attrgetter

from torch import nn

_training = attrgetter("training")


class Modes:
    """The flags of `module`, which has modules of the same names as `source`. Takes over those that the source has now."""

    def __init__(self, module: nn.Module, source: nn.Module):
        self.names = [name for name, _ in source.named_modules(remove_duplicate=False)]
        self.modules = [module.get_submodule(name) for name in self.names]
        self.sources = [source.get_submodule(name) for name in self.names]
        for mine, theirs in zip(self.modules, self.sources):
            mine.training = theirs.training
        self.adapters = True

    def now(self) -> list[bool]:
        """One flag a module, True in train mode, and one for the adapters."""
        return [*map(_training, self.modules), self.adapters]

    def set_adapters(self, adapters: bool) -> None:
        self.adapters = adapters

    def set_source(self, flags: list[bool] | None = None) -> None:
        """Give the source these flags (see `now`), or the module's."""
        for flag, theirs in zip(flags or self.now(), self.sources):
            theirs.training = flag

    def text(self) -> str:
        """`train`, `eval`, or `train, norm eval` where a module's mode is not that of the module around it."""
        flags = dict(zip(self.names, self.now()))
        words = ["train" if flags[""] else "eval"]
        for name, flag in flags.items():
            if name and flag != flags[name.rpartition(".")[0]]:
                words.append(f"{name} {'train' if flag else 'eval'}")
        return ", ".join(words + ([] if self.adapters else ["without adapters"]))
