"""Leave what a process of `autopar train --elastic` holds, for those that go on when others are lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..errors import CollectiveTimeout, RankFailure
from ..storage import checkpoint, remains


class Remaining:
    """Follows a run step by step. `folder`: where to leave what this rank holds, None if nobody wants it."""

    def __init__(self, folder: Path | None, model, optimizer: torch.optim.Optimizer, scaler):
        self.folder, self.model, self.optimizer, self.scaler = folder, model, optimizer, scaler
        self.noted: remains.Noted | None = None

    def is_whole(self, step: int, data: Any) -> None:
        """Note that a step is done. `data`: as the run saves it."""
        if self.folder is not None:
            self.noted = remains.noted(self.model, step, data, self.scaler, checkpoint.run_of(self.model))

    def changes(self) -> None:
        """Note that the optimizer begins to change what there is."""
        self.noted = None

    @contextmanager
    def left_behind(self) -> Iterator[None]:
        """Leave the state behind the last whole step if a rank is lost inside."""
        try:
            yield
        except (RankFailure, CollectiveTimeout):
            if self.folder is not None and self.noted is not None:
                remains.leave(self.folder, self.model, self.optimizer, self.noted)
            raise
