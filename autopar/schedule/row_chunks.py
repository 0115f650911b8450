"""Orders for micro-batches that are chunks of a row's tokens, one after the other.

A chunk reads the keys of those before it, and later chunks add to the gradients of its own, so the chunks of a row go
forward in order and backward in reverse: a rank does as many forwards more before each backward as a row has chunks
after the first (Seq1F1B, arXiv 2406.03488). It then has that many more chunks in flight, each a part of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ScheduleError
from .actions import Action


def in_chunks(orders: Sequence[Sequence[Action]], chunks: int) -> list[list[Action]]:
    """Return orders of one stage a rank, of forwards and backwards, for rows of so many chunks each: micro-batch i is
    chunk i mod `chunks` of its row. Raise ScheduleError for others."""
    return [_order(order, chunks) for order in orders]


def _order(order: Sequence[Action], chunks: int) -> list[Action]:
    forwards = [action for action in order if action.kind == "F"]
    if len({action.stage for action in order}) > 1 or any(action.kind == "W" for action in order):
        raise ScheduleError(
            "chunks of a row's tokens need one stage a rank", fix="use schedule='1f1b', 'zb_h1', 'zb_h2' or 'gpipe'"
        )
    found, done, before = [], 0, 0
    for action in order:
        if action.kind == "F":
            before += 1
            continue
        most = min(len(forwards), before + chunks - 1)
        found += [*forwards[done:most], action._replace(micro_batch=mirrored(action.micro_batch, chunks))]
        done = most
    return found


def mirrored(number: int, chunks: int) -> int:
    """Return which micro-batch's backward takes the place of that of another one, where those of a row are reversed."""
    row, chunk = divmod(number, chunks)
    return row * chunks + chunks - 1 - chunk
