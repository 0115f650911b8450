"""The outputs of a call that runs in micro-batches: each goes to its place in the whole as soon as it is made, so that
they are held once.

Outputs beside the loss for which a device has no room (`Plan.unmade_bytes`) are let go of. Whoever reads one gets it
from the forwards of all micro-batches, run a second time on the tensors of the call; see autopar/runtime/unmade.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from ..codegen.split_batch import join
from ..passes.pipeline.micro_batch import MicroBatched

Before = Callable[[str, int, Tensor], Tensor]


class JoinedOutputs:
    """Takes this rank's parts of outputs by name. `likes`: shape and dtype of what all micro-batches give on this rank,
    without values; `gathered`: outputs whose parts change their layout once all are made, before they are joined."""

    def __init__(self, micro: MicroBatched, likes: Mapping[str, Tensor], gathered: Collection[str]):
        self.micro, self.likes, self.gathered = micro.of_rows, likes, gathered
        self.chunks = micro.chunks[0] if micro.chunks else None
        self.of_row: dict[str, dict[int, Tensor]] = {}  # chunks of rows that are not all there
        self.parts: dict[str, dict[int, Tensor]] = {}
        self.wholes: dict[str, Tensor] = {}

    def take(self, name: str, i: int, part: Tensor) -> None:
        """Take an output of micro-batch `i`, which may be a chunk of its rows."""
        if self.chunks is not None:
            found, count = self.of_row.setdefault(name, {}), self.chunks.count
            found[i] = part
            i = i // count
            numbers = range(i * count, (i + 1) * count)
            if not found.keys() >= {*numbers}:
                return
            part = join([found.pop(number) for number in numbers], self.chunks.joins[name])
        if isinstance(dim := self.micro.joins[name], int) and name not in self.gathered:
            self._place(name, i, part, dim)
        else:
            self.parts.setdefault(name, {})[i] = part

    def joined(self, before: Before) -> dict[str, Tensor]:
        """Return the outputs of the whole batch and hold none any more; `before` changes the layout of a part."""
        parts, self.parts = self.parts, {}
        found = {}
        for name, mine in parts.items():
            how = self.micro.joins[name]
            if isinstance(how, int):
                for i in sorted(mine):
                    self._place(name, i, before(name, i, mine.pop(i)), how)
            else:
                found[name] = join([mine[i] for i in sorted(mine)], how)
        wholes, self.wholes = self.wholes, {}
        return wholes | found

    def _place(self, name: str, i: int, part: Tensor, dim: int) -> None:
        """Write a part to its place, which is as far into the whole as the micro-batch is into the batch."""
        if name not in self.wholes:
            self.wholes[name] = torch.empty(self.likes[name].shape, dtype=part.dtype, device=part.device)
        whole, micro = self.wholes[name], self.micro
        count = micro.micro_batches if micro.smaller is None else micro.samples  # of what `start` counts
        whole.narrow(dim, micro.start(i) * whole.shape[dim] // count, part.shape[dim]).copy_(part)
