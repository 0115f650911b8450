"""Find the schedules that need their messages in another order than the one they are sent in."""

from __future__ import annotations

from autopar.schedule import Schedule


def crossings(schedule: Schedule) -> list[tuple[int, int]]:
    """Return pairs (sender, receiver) of ranks between which messages are needed in another order than the one they are
    sent in.

    Such a pair needs messages with tags, or receives that are posted in the sender's order (torch.distributed on NCCL
    has no tags).
    """
    sent: dict[tuple[int, int], list[tuple[bool, int, int]]] = {}
    received: dict[tuple[int, int], list[tuple[bool, int, int]]] = {}
    rank_of, stages = schedule.rank_of_stage, schedule.stages
    for rank, order in enumerate(schedule.orders):
        for kind, stage, i in order:
            if kind == "W":
                continue
            before, after = (stage - 1, stage + 1) if kind == "F" else (stage + 1, stage - 1)
            if 0 <= before < stages and rank_of[before] != rank:
                received.setdefault((rank_of[before], rank), []).append((kind == "F", stage, i))
            if 0 <= after < stages and rank_of[after] != rank:
                sent.setdefault((rank, rank_of[after]), []).append((kind == "F", after, i))
    return sorted(pair for pair in sent if sent[pair] != received.get(pair))
