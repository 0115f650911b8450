"""Process groups: their timeouts, their names, the store of the world, broadcasts and sends of all members at once."""

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


def start_exchange(sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], name: str) -> list:
    """Start to send a tensor to each member of the process group of a name, and to fill a tensor with what each of them
    sends here; return what to wait for. Nothing goes from this member to itself. All receives are posted before the
    first send: gloo sends nothing before the other side has said that it waits, and would say so behind all that it
    sends itself."""
    group = group_of(name)
    others = [(group.rank() + step) % group.size() for step in range(1, group.size())]
    works = [group.recv([received[other]], other, 0) for other in reversed(others) if received[other].numel()]
    return works + [group.send([sent[other]], other, 0) for other in others if sent[other].numel()]


def start_all_to_all(result: torch.Tensor, x: torch.Tensor, received: Sequence[int], sent: Sequence[int], name: str):
    """Start to send `sent[i]` rows of x to member i of the process group of a name, and to fill `received[i]` rows of
    the result with what comes from it, in order; return what to wait for."""
    return group_of(name).alltoall_base(result, x.contiguous(), list(received), list(sent))


def waited_for(tensor: torch.Tensor, works: Sequence) -> torch.Tensor:
    """Return a tensor that a `wait_tensor` on it, the only one, waits for."""
    from torch._C._distributed_c10d import _register_work

    for work in works:
        _register_work(tensor, work)
    return tensor


def default_store():
    """Return the store that the ranks of the world met at: what they tell each other there needs no collective."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def abort_groups() -> None:
    """Abort the communicators of all process groups, so that kernels that wait in one for other ranks end."""
    from torch.distributed.distributed_c10d import _abort_process_group

    _abort_process_group()


def collectives_on_their_way() -> list[str]:
    """Return the collectives that NCCL's flight recorder has seen begin and not end, oldest first; none where it does
    not run, as on CPUs."""
    import pickle

    from torch._C import _distributed_c10d

    dump = getattr(_distributed_c10d, "_dump_nccl_trace", None)
    entries = pickle.loads(dump(True, False, True)).get("entries", []) if dump is not None else []
    return [
        f"{entry.get('profiling_name', 'a collective')} of group {entry.get('process_group', ('',))[-1] or 'of all'}, "
        f"number {entry.get('collective_seq_id', '?')}, {entry.get('state', 'unknown')}"
        for entry in entries
        if entry.get("state") != "completed"
    ]
