"""The memory of keys and values that chunks of rows keep for each other (autopar/ops/kept_keys.py).

A rank holds those of every row of which a chunk is in flight, whole from its first chunk on. Of these a chunk's own
count as what it saves; the rest is counted here, with the sums of the gradients of one row, whose backwards follow one
another, and with what the attention of the last chunk takes more for gradients of all its keys than the mean one that
is planned with.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...ops.kept_keys import TOKENS, own_share, sums_dtype
from ...rules.reading import bound
from ...schedule.actions import Schedule
from ..problem.vertices import Vertex
from .part import Part


def add_kept(part: Part, vertex: Vertex, bytes_: float) -> None:
    """Add an attention's keys, or values, to the part that runs it: `bytes_` are those that a mean chunk reads."""
    value, own = vertex.values[0], own_share(vertex.node)
    part.kept_bytes += bytes_ * own
    part.kept_sum_bytes += bytes_ * own * sums_dtype(value.dtype).itemsize / value.dtype.itemsize


def add_growing(part: Part, vertex: Vertex, bytes_: float) -> None:
    """Add what the attention of a row's last chunk takes more than the `bytes_` that a mean one makes and fills: in
    proportion to its keys."""
    given = bound(vertex.node)
    earlier, keys = int(given["first"]), given["k"].meta["val"].shape[TOKENS]
    part.growing_bytes = max(part.growing_bytes, bytes_ * earlier / keys)


def kept_bytes(orders: Schedule, rank: int, chunks: int, parts: Sequence[Part]) -> tuple[float, float]:
    """Return the bytes that kept keys and the sums of their gradients add to the most that a rank's chunks in flight
    save, and what its last chunk takes more than a mean one. No bytes where rows are whole."""
    if chunks == 1:
        return 0.0, 0.0
    own = [parts[stage] for stage in orders.stages_of(rank)]
    kept, sums, saved = (sum(getattr(p, name) for p in own) for name in ("kept_bytes", "kept_sum_bytes", "saved_bytes"))
    flying, rows = set[int](), set[int]()
    alone = most = 0.0
    for kind, _, i in orders.orders[rank]:
        if kind == "F":
            flying.add(i)
            rows.add(i // chunks)
        held = saved * len(flying)
        alone = max(alone, held)
        most = max(most, held + kept * (chunks * len(rows) - len(flying)) + (0.0 if kind == "F" else chunks * sums))
        if kind in "BI" and i % chunks == 0:
            rows.discard(i // chunks)
        if kind in "BW":
            flying.discard(i)
    return most - alone, max((part.growing_bytes for part in own), default=0.0)
