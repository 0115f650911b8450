"""A schedule as a grid of text: a row a rank, a column a unit of time."""

from __future__ import annotations

from .actions import Action
from .played import Played


def grid(played: Played, unit_seconds: float | None = None) -> str:
    """`F0` is the forward of micro-batch 0; with several stages a rank, `2F0` that of stage 2. `.` waits, `-` goes on.

    A column shows what the rank did in the middle of it. `unit_seconds`: one column, by default the shortest action.
    """
    times = [(rank, action, start - played.first, end - played.first) for rank, action, start, end in played]
    unit = unit_seconds or min((end - start for *_, start, end in times if end > start), default=1.0)
    columns = max(1, round(played.seconds / unit))
    rows = [["."] * columns for _ in played.schedule.orders]
    for rank, action, start, end in times:
        first, last = (max(0, -int(-(t / unit - 0.5 - 1e-9) // 1)) for t in (start, end))  # the columns whose middles are inside
        for column in range(first, min(last, columns)):
            rows[rank][column] = label(action, played) if column == first else "-"
    width = max(len(cell) for row in rows for cell in row)
    digits = len(str(len(rows) - 1))
    lines = (" ".join(cell.ljust(width) for cell in row).rstrip() for row in rows)
    return "\n".join(f"rank {rank:>{digits}}: {line}" for rank, line in enumerate(lines))


def label(action: Action, played: Played) -> str:
    return str(action) if played.schedule.stages_per_rank > 1 else f"{action.kind}{action.micro_batch}"


def summary(played: Played) -> str:
    """One line: how long, how much of it idle, how much held."""
    peaks = played.peaks
    held = f"{min(peaks):g} to {max(peaks):g}" if min(peaks) != max(peaks) else f"{max(peaks):g}"
    bubble = f"bubble {played.bubble:.1%} ({played.bubble_in_window:.1%} in the ranks' own windows)"
    return f"{played.schedule.name}: {played.seconds:g} s, {bubble}, in flight on a rank {held}"
