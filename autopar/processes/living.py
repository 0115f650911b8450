"""Tell which ranks are lost, when some are."""

from __future__ import annotations

import torch.distributed as dist

from . import watch
from .peers import CUT_OFF, GONE


def lost_ranks() -> set[int]:
    """Return the ranks that are gone or cut off, as far as this one can ask the others, some if they are very many."""
    return {rank for rank, said in watch.answers(range(dist.get_world_size())).items() if said in (GONE, CUT_OFF)}
