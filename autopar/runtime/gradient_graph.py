"""A backward of one rank, ready to run, that returns each gradient in memory of its own: optimizers write into
gradients, and further backwards add to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .. import _torch
from .loaded import LoadedGraph


class GradientGraph(LoadedGraph):
    """A LoadedGraph whose results have each memory of their own."""

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
            given = [v for v in values if isinstance(v, torch.Tensor)]
            taken, names = [_span(v) for v in given], [_torch.weak_storage(v) for v in given]
            del given  # so that each value is freed after its last use, in the first run too
            results = self.run(values)
            self.to_copy = _shared_memory(results, taken)
            del names  # until now no result could have the key of a value that was freed
        else:
            results = self.run(values)
        return [r.clone() if copy else r for r, copy in zip(results, self.to_copy)] if any(self.to_copy) else results


def _shared_memory(results: Sequence, taken: list[tuple[int, int, int]]) -> list[bool]:
    """Return for each result whether it overlaps itself, an earlier one or what the graph was given: the spans `taken`,
    to which those of the results are added."""
    shared = []
    for result in results:
        if not isinstance(result, torch.Tensor):
            shared.append(False)
            continue
        key, start, end = _span(result)
        overlaps_itself = end - start < result.numel() * result.element_size()
        shared.append(overlaps_itself or any(key == k and start < e and s < end for k, s, e in taken))
        taken.append((key, start, end))
    return shared


def _span(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return a tensor's memory, its first byte there and the one behind its last."""
    length = (
        sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) + 1 if tensor.numel() else 0
    )
    start = tensor.storage_offset() * tensor.element_size()
    return _torch.storage_key(tensor), start, start + length * tensor.element_size()
