"""A copy of each rank's share of a run in the memory of another rank, from which the run goes on when ranks are lost.

A share has each part that ranks hold alike once, so that all shares together are the run, without a part that two of
them have. A rank packs its share on the host and sends it to a neighbour, on another machine where there are several,
while training goes on: each holds two shares of one step, for a moment of two.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..processes import process_groups, watch
from .held_parts import HeldParts, Noted

Shares = tuple[Tensor, Tensor]  # packed: of this rank, of another one


class Copies:
    """Keeps shares for one rank. All ranks call `take` and `look` together, behind the same steps."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer):
        self.model, self.optimizer = model, optimizer
        self.held: list[Shares] = []  # of the last step, behind another one until all ranks have those of the last
        self.coming: tuple[Shares, list[dist.Work | None]] | None = None
        ranks, machines = dist.get_world_size(), watch.machines()
        here = int(os.environ.get("LOCAL_WORLD_SIZE") or machines.count(machines[0]))  # ranks on a node
        self.apart = here if here < ranks else 1  # ranks from one to the next that has a copy

    def take(self, noted: Noted) -> None:
        """Begin to copy what there is behind the step that is noted. Collective."""
        ranks, rank, group = dist.get_world_size(), dist.get_rank(), process_groups.host_group()
        to, other = (rank + self.apart) % ranks, (rank - self.apart) % ranks
        mine = HeldParts.of(self.model, self.optimizer, noted).packed()
        theirs = torch.empty(1, dtype=torch.int64)
        sizes = [dist.isend(torch.tensor([mine.numel()]), to, group=group), dist.irecv(theirs, other, group=group)]
        self._wait(sizes)
        theirs = torch.empty(int(theirs), dtype=torch.uint8)
        works = [dist.isend(mine, to, group=group), dist.irecv(theirs, other, group=group)]
        self.coming = (mine, theirs), works

    def look(self) -> None:
        """Let go of older shares when all ranks have the last ones, and wait for those that have come meanwhile.
        Collective, behind a step."""
        del self.held[1:]  # all ranks called this behind an earlier step: they have what came then
        if self.coming is not None:
            shares, works = self.coming
            self._wait(works)
            self.held, self.coming = [shares, *self.held], None

    def leave(self, folder: Path, but: int) -> None:
        """Write the shares that this rank has into a folder, but its own of one step."""
        for shares in self.held:
            for parts in map(HeldParts.unpacked, shares):
                if (parts.notes["rank"], parts.notes["step"]) != (dist.get_rank(), but):
                    parts.leave(folder, self.model)

    def _wait(self, works: list[dist.Work | None]) -> None:
        with watch.collective("copies of what ranks hold"):
            for work in works:
                if work is not None:  # None is for ranks that are not in the group
                    watch.patiently(work.wait)
