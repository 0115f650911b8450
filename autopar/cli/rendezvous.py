"""The place where the ranks of `autopar train` meet.

torchrun keeps one store when it starts ranks again, in which what those that are gone have written still stands, such
as their addresses. So each start has a corner of its own, under a name that rank 0 makes up: a rank asks for it by a
word that no earlier one has used, and rank 0 answers whoever asks until all have heard.
"""

from __future__ import annotations

import os
import time
import uuid

import torch
import torch.distributed as dist

from ..errors import AutoparError, CollectiveTimeout

SECONDS_BETWEEN_LOOKS, MOST_SECONDS = 0.05, 300.0


def join(backend: str, url: str, rank: int, world: int, device: torch.device | None = None) -> None:
    """Make the process group of all ranks of this start, which meet at `url`. On a GPU, `device`, NCCL connects all of
    them at once, so that messages between two stages go through the communicator that all have. Raises AutoparError if
    they cannot reach each other."""
    try:
        dist.init_process_group(
            backend, store=store_of(url, rank, world), rank=rank, world_size=world, device_id=device
        )
    except RuntimeError as error:  # of gloo and NCCL, whose texts name no remedy
        raise AutoparError(
            f"rank {rank} cannot reach the other processes: {str(error).splitlines()[0]}",
            fix="name the network that they share, of those that ip addr lists: GLOO_SOCKET_IFNAME=NAME, and on GPUs "
            "NCCL_SOCKET_IFNAME=NAME; under torchrun see that --rdzv-endpoint is on it",
        ) from error


def store_of(url: str, rank: int, world: int) -> dist.Store:
    """Return the store in which the ranks of this start meet: at `url`, file://PATH or env:// under torchrun. Raises
    CollectiveTimeout if some do not come."""
    store, _, _ = next(dist.rendezvous(url, rank, world))
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return store
    name = _answered(store, world) if rank == 0 else _heard(store, rank)
    return dist.PrefixStore(name, store)


def _heard(store: dist.Store, rank: int) -> str:
    word = uuid.uuid4().hex
    store.set(f"autopar/asks/{rank}", word)
    name = store.get(f"autopar/answer/{word}").decode()  # waits
    store.set(f"{name}/heard/{rank}", "")
    return name


def _answered(store: dist.Store, world: int) -> str:
    name, missing, end = f"autopar/{uuid.uuid4().hex}", [*range(1, world)], time.monotonic() + MOST_SECONDS
    while missing := [rank for rank in missing if not store.check([f"{name}/heard/{rank}"])]:
        for rank in missing:
            if store.check([f"autopar/asks/{rank}"]):
                store.set(f"autopar/answer/{store.get(f'autopar/asks/{rank}').decode()}", name)
        if time.monotonic() > end:
            raise CollectiveTimeout(
                f"ranks {', '.join(map(str, missing))} did not come to the start within {MOST_SECONDS:g} s",
                ranks=tuple(missing),
                collective="the start",
                fix="see what torchrun says on their nodes",
            )
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return name
