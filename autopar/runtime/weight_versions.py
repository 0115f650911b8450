"""The versions of a stage's weights that asynchronous pipelines keep, on one rank.

A version is the tensors that a forward was given. The optimizer writes into the newest one: where something has still
to read that one, it is put aside first and the optimizer gets copies. So what a forward saved for its backward never
changes, and there are never more versions than are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import _torch


class WeightVersions:
    """`parameters`, by name, are those of the optimizer. `newest`: how often it has stepped. `most`: the most versions
    at once."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]):
        self.parameters = dict(parameters)
        self.newest, self.most = 0, 1
        self.stashed: dict[int, dict[str, Tensor]] = {}

    @property
    def alive(self) -> int:
        """Return how many versions there are now."""
        return 1 + len(self.stashed)

    def at(self, version: int) -> Mapping[str, Tensor]:
        """Return the local tensors of a version. Raises KeyError for one that is gone or not there yet."""
        return self._now() if version == self.newest else self.stashed[version]

    def _now(self) -> dict[str, Tensor]:
        return {name: _local(p) for name, p in self.parameters.items()}

    def advance(self, step: Callable[[], None], needed: Collection[int]) -> None:
        """Make the next version by an optimizer's `step`. Versions that are not `needed` are given up."""
        for version in [v for v in self.stashed if v not in needed]:
            del self.stashed[version]
        if self.newest in needed:
            self.stashed[self.newest] = self._now()
            for parameter in self.parameters.values():
                _replace(parameter, _local(parameter).clone())
        step()
        self.newest += 1
        self.most = max(self.most, self.alive)

    def restart(self) -> None:
        """Count from the newest version, which becomes version 0."""
        self.stashed.clear()
        self.newest, self.most = 0, 1


def _local(parameter: nn.Parameter) -> Tensor:
    return _torch.local_of(parameter) if isinstance(parameter, DTensor) else parameter.detach()


def _replace(parameter: nn.Parameter, values: Tensor) -> None:
    if isinstance(parameter, DTensor):
        _torch.set_local(parameter, values)
    else:
        parameter.data = values
