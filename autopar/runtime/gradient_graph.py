"""A backward of one rank, ready to run, that returns each gradient in memory of its own: optimizers write into
gradients, and further backwards add to them. A forward may be in the same graph, whose results stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

import torch
from torch import fx

from .. import _torch
from ..passes.pipeline.side_by_side import results_of_forward
from ..processes.process_groups import ProcessGroups
from .loaded import LoadedGraph


class GradientGraph(LoadedGraph):
    """A LoadedGraph whose results have each memory of their own, but for those of a forward in it."""

    def __init__(self, module: fx.GraphModule, groups: ProcessGroups, device: torch.device, phase: str):
        self.kept = results_of_forward(module.graph)
        super().__init__(module, groups, device, phase)

    def load(self, phase: str) -> None:
        """Make the module ready to run."""
        super().load(phase)
        self.to_copy: list[bool] | None = None  # a result each; known after the first run

    def compile(self, options: Mapping[str, object]) -> None:
        """Compile the graph as LoadedGraph does, and look anew for results that share memory."""
        super().compile(options)
        self.to_copy = None

    def __call__(self, values: list) -> Sequence[torch.Tensor]:
        if self.to_copy is None:
            given = list(filter(_has, values))
            taken, names = [_span(v) for v in given], [_torch.weak_storage(v) for v in given]
            del given  # so that each value is freed after its last use, in the first run too
            results = self.run(values)
            shared = _shared_memory(results[self.kept :], taken + [_span(r) for r in results[: self.kept] if _has(r)])
            self.to_copy = [False] * self.kept + shared
            del names  # until now no result could have the key of a value that was freed
        else:
            results = self.run(values)
        return [r.clone() if copy else r for r, copy in zip(results, self.to_copy)] if any(self.to_copy) else results


def _shared_memory(results: Sequence, taken: list[tuple[int, int, int]]) -> list[bool]:
    """Return for each result whether it overlaps itself, an earlier one or what the graph was given: the spans `taken`,
    to which those of the results are added."""
    shared = []
    for result in results:
        if not _has(result):
            shared.append(False)
            continue
        key, start, end = _span(result)
        overlaps_itself = end - start < result.numel() * result.element_size()
        shared.append(overlaps_itself or any(key == k and start < e and s < end for k, s, e in taken))
        taken.append((key, start, end))
    return shared


def _has(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor)


def _span(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return a tensor's memory, its first byte there and the one behind its last."""
    length = (
        sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) + 1 if tensor.numel() else 0
    )
    start = tensor.storage_offset() * tensor.element_size()
    return _torch.storage_key(tensor), start, start + length * tensor.element_size()
