"""Process groups: their timeouts, their names, the store of the world, and exchanges between all members at once."""

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


def exchange(sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], name: str) -> None:
    """Send a tensor to each member of the process group of a name, and fill a tensor with what each of them sends here,
    all at once; nothing between this member and itself. All receives are posted before the first send: gloo sends
    nothing before the other side has said that it waits, and would say so behind all that it sends itself."""
    group, works = group_of(name), []
    others = [(group.rank() + step) % group.size() for step in range(1, group.size())]
    works = [group.recv([received[other]], other, 0) for other in reversed(others)]
    works += [group.send([sent[other]], other, 0) for other in others]
    for work in works:
        work.wait()


def default_store():
    """Return the store that the ranks of the world met at: what they tell each other there needs no collective."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
