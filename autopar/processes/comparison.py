"""Compare from time to time, beside the steps, whether the ranks of each group called the same.

Ranks whose collectives look alike do not notice that they meet in different calls. Each asks the next one of every
group that it meets in, over the lines of peers.py, which costs a millisecond of a thread of its own; a step sends
nothing and waits for nobody. What differs stays different, so that it is found whenever the two compare next.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import torch.distributed as dist

from . import process_groups, unlike
from .call_log import ALL, DIGESTS

if TYPE_CHECKING:
    from .causes import Cause
    from .watch import Watch

SECONDS, LOOKS = 2.0, 8  # between comparisons; in AUTOPAR_TIMEOUT_S, if that is less
LEAST_SECONDS = 0.1
PATIENCE_SECONDS = 2.0  # until most ranks say who it was


def start(watch: Watch) -> None:
    """Compare the ranks of a watch until one of them fails or the world ends."""
    threading.Thread(target=_compare, args=(watch,), name="autopar comparison", daemon=True).start()


def _compare(watch: Watch) -> None:
    while watch.cause is None:
        time.sleep(max(LEAST_SECONDS, min(SECONDS, process_groups.timeout_seconds() / LOOKS)))
        if watch.world() is None or watch.world() is not dist.group.WORLD:
            return
        if (cause := look(watch)) is not None and watch.cause is None:
            watch.tell(cause, range(watch.peers.world))


def look(watch: Watch) -> Cause | None:
    """Return who called something else than the others, if this rank and the next one of a group did not call the
    same."""
    rank, world = watch.peers.rank, range(watch.peers.world)
    following = {log.ranks[(log.ranks.index(rank) + 1) % len(log.ranks)] for log in [*watch.logs.groups.values()]}
    answers = watch.peers.ask(DIGESTS, sorted(following))
    if unlike.disagreeing(answers | {rank: watch.logged(DIGESTS)}) is None:
        return None
    end, cause = time.monotonic() + PATIENCE_SECONDS, None
    while watch.cause is None and time.monotonic() < end:  # some may not have come to the call in question
        cause = unlike.found(watch.peers.ask(ALL, world) | {rank: watch.logged(ALL)}) or cause
        if cause is not None and (len(cause.ranks) == 1 or len(world) == 2):
            break
        time.sleep(0.1)
    return cause
