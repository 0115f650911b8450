"""Process groups: their timeouts, their names, the store of the world, and broadcasts from all members at once."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch


def set_group_timeout(group, seconds: float) -> None:
    """Set how long collectives of a process group that start from now on wait for other ranks."""
    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(timedelta(seconds=seconds), group)


def group_of(name: str):
    """Return the process group of a name."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)


def broadcasts(parts: Sequence[torch.Tensor], name: str) -> None:
    """Fill part i with what member i of the process group of a name has there, all of them at once."""
    from torch.distributed.distributed_c10d import BroadcastOptions

    group, works = group_of(name), []
    for root, part in enumerate(parts):
        options = BroadcastOptions()
        options.rootRank = root
        works.append(group.broadcast([part], options))
    for work in works:
        work.wait()


def default_store():
    """Return the store that the ranks of the world met at: what they tell each other there needs no collective."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
