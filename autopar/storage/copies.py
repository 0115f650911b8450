"""A copy of each rank's share of a run in the memory of another rank, from which the run goes on when ranks are lost.

A share has each part that ranks hold alike once, so that all shares together are the run, without a part that two of
them have. A rank packs its share on the host and sends it to a neighbour, on another machine where there are several:
each holds two shares of one step, and of two until all ranks have those of the last. They wait for each other: what is
still on its way when a rank is lost keeps connections open, on which others then wait.
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
    """Keeps shares for one rank."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer):
        self.model, self.optimizer = model, optimizer
        self.held: list[Shares] = []  # of the last step, then of the one before
        ranks, machines = dist.get_world_size(), watch.machines()[0]
        here = int(os.environ.get("LOCAL_WORLD_SIZE") or machines.count(machines[0]))  # ranks on a node
        self.apart = here if here < ranks else 1  # ranks from one to the next that has a copy

    def take(self, noted: Noted) -> None:
        """Copy what there is behind the step that is noted. Collective."""
        ranks, rank, group = dist.get_world_size(), dist.get_rank(), process_groups.host_group()
        to, other = (rank + self.apart) % ranks, (rank - self.apart) % ranks
        mine = HeldParts.of(self.model, self.optimizer, noted).packed()
        theirs = torch.empty(1, dtype=torch.int64)
        self._swap(torch.tensor([mine.numel()]), to, theirs, other, group)
        theirs = torch.empty(int(theirs), dtype=torch.uint8)
        self._swap(mine, to, theirs, other, group)
        self.held.insert(0, (mine, theirs))

    def forget_older(self) -> None:
        """Let go of all shares but the last, which all ranks have: called behind a later step than that."""
        del self.held[1:]

    def leave(self, folder: Path, but: int) -> None:
        """Write the shares that this rank has into a folder, but its own of one step."""
        for shares in self.held:
            for parts in map(HeldParts.unpacked, shares):
                if (parts.notes["rank"], parts.notes["step"]) != (dist.get_rank(), but):
                    parts.leave(folder, self.model)

    @staticmethod
    def _swap(mine: Tensor, to: int, theirs: Tensor, other: int, group: dist.ProcessGroup) -> None:
        with watch.collective("copies of what ranks hold"):
            for work in [dist.isend(mine, to, group=group), dist.irecv(theirs, other, group=group)]:
                if work is not None:  # None is for ranks that are not in the group
                    watch.patiently(work.wait)
