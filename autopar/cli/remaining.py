"""Leave what a process of `autopar train --elastic` holds, for those that go on when others are lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..errors import CollectiveTimeout, RankFailure
from ..processes.living import lost_ranks
from ..storage import checkpoint
from ..storage.copies import Copies
from ..storage.held_parts import HeldParts, Noted, noted


class Remaining:
    """Follows a run step by step. `folder`: where to leave what this rank holds, None if nobody wants it;
    `copied_every`: steps from one copy in another rank's memory to the next, 0 for none."""

    def __init__(self, folder: Path | None, model, optimizer: torch.optim.Optimizer, scaler, copied_every: int):
        self.folder, self.model, self.optimizer, self.scaler = folder, model, optimizer, scaler
        self.noted: Noted | None = None
        self.copied_every = copied_every if folder is not None and dist.get_world_size() > 1 else 0
        self.copies = Copies(model, optimizer) if self.copied_every else None

    def is_whole(self, step: int, data: Any) -> None:
        """Note that a step is done. `data`: as the run saves it. Collective where there are copies."""
        if self.folder is not None:
            self.noted = noted(self.model, step, data, self.scaler, checkpoint.run_of(self.model))
        if self.copies is not None and self.noted is not None:
            self.copies.forget_older()
            if step % self.copied_every == 0:
                self.copies.take(self.noted)

    def changes(self) -> None:
        """Note that the optimizer begins to change what there is."""
        self.noted = None

    @contextmanager
    def left_behind(self) -> Iterator[None]:
        """Leave the state behind the last whole step, and copies, if a rank is lost inside."""
        try:
            yield
        except (RankFailure, CollectiveTimeout):
            if self.folder is not None and self.noted is not None:
                HeldParts.of(self.model, self.optimizer, self.noted, lost_ranks()).leave(self.folder, self.model)
            if self.folder is not None and self.copies is not None:
                self.copies.leave(self.folder, but=-1 if self.noted is None else self.noted.step)
            raise
