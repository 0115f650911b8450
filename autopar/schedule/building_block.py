"""Schedules that repeat one building block: Qi et al., "Pipeline Parallelism with Controllable Memory"
(arXiv 2405.15362).

Each rank has two stages, placed as a V: rank r has stages r and 2p-1-r. Micro-batch i goes through the block

    F down the ranks, F up again, I down, I up

with the same offsets for every i, 6 units of time after the one before (F, I and W of two stages). What is in flight on
a rank is how long the block lives there, over 6: the slower it goes from rank to rank, the more memory and the less
idle time at the ends. Only the order is used: times follow from playing it, so that at both ends the block closes up by
itself.

    V-Min   1 unit from rank to rank, each way             a third of 1F1B's memory
    V-Half  1 and 2 units, by turns                        a half
    (ZB-V   2 and 4, the same memory as 1F1B: `phases.zbv` is that order with its beginning closed up)
"""

from __future__ import annotations

from collections.abc import Sequence

from .actions import Action

PERIOD = 6
Times = tuple[int, ...]  # of the four ways


def block(ranks: int, hops: Sequence[int], waits: Sequence[int]) -> list[Times]:
    """Return for each rank when the block has its F of stage r, F, I of the other stage, I of stage r.

    `hops`: units from rank to rank on the four ways; `waits`: between them, at the three turns.
    """
    far, starts = ranks - 1, [0]
    for hop, wait in zip(hops, waits):
        starts.append(starts[-1] + hop * far + 1 + wait)
    steps = [(start, hop, way % 2 == 1) for way, (start, hop) in enumerate(zip(starts, hops))]
    return [tuple(start + hop * (far - rank if up else rank) for start, hop, up in steps) for rank in range(ranks)]


def v_min(ranks: int) -> list[Times]:
    """Return the block of V-Min."""
    wait = 2 if ranks % 3 == 0 else 0
    return block(ranks, (1, 1, 1, 1), (wait, 0, wait))


def v_half(ranks: int) -> list[Times]:
    """Return the block of V-Half."""
    return block(ranks, (1, 2, 1, 2), (0, 0, 1) if ranks % 2 else (3, 0, 4))


def repeat(blocks: Sequence[Times], micro_batches: int) -> list[list[Action]]:
    """Return the orders of F and I. A rank's four times differ modulo the period (the waits are chosen so), hence no
    two are at once."""
    last, orders = 2 * len(blocks) - 1, []
    for rank, times in enumerate(blocks):
        moves = (("F", rank), ("F", last - rank), ("I", last - rank), ("I", rank))
        timed = [
            (PERIOD * i + time, Action(*move, i)) for i in range(micro_batches) for move, time in zip(moves, times)
        ]
        orders.append([action for _, action in sorted(timed)])
    return orders
