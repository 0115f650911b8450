"""A schedule as a grid of text: a row a rank, a column a unit of time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

from ..utils.format import ms, text_width
from .actions import KINDS, Action
from .played import Played

WIDEST, COLUMNS = 120, 60  # columns of a grid whose shortest action is one; of a grid that would be wider


def text(played: Played | Mapping[str, Played]) -> str:
    """Return the summary, a grid that fits a window and what its letters are; of several runs by their names, each on
    its own scale."""
    runs = {"": played} if isinstance(played, Played) else played
    blocks = [
        f"{f'{name}: ' if name else ''}{summary(run)}\n{grid(run, _unit(run), text_width())}\n"
        for name, run in runs.items()
    ]
    return "\n".join(blocks) + legend(*runs.values()) + "\n"


def _unit(run: Played) -> float | None:
    """Return the seconds of a column, or None for the shortest action where that makes few enough columns."""
    shortest = min((end - start for *_, start, end in run if end > start), default=1.0)
    return None if run.seconds <= WIDEST * shortest else run.seconds / COLUMNS


def legend(*runs: Played) -> str:
    """Say what the letters of grids are."""
    used = {action.kind for run in runs for _, action, *_ in run}
    letters = ", ".join(f"{kind} {word}" for kind, word in KINDS.items() if kind in used)
    where = (
        "2F0: of stage 2, micro-batch 0"
        if any(r.schedule.stages_per_rank > 1 for r in runs)
        else "F0: of micro-batch 0"
    )
    return f"{letters}; {where}; . waits, - goes on"


def grid(played: Played, unit_seconds: float | None = None, width: float = math.inf) -> str:
    """Draw a run: `F0` is the forward of micro-batch 0; with several stages a rank, `2F0` that of stage 2. `.` waits,
    `-` goes on.

    A column shows what the rank did in the middle of it; one with a `+`, as `I0+W0`, also what came and went between
    two middles. `unit_seconds`: one column, by default the shortest action. What exceeds `width` goes on in rows below.
    """
    times = [(rank, action, start - played.first, end - played.first) for rank, action, start, end in played]
    unit = unit_seconds or min((end - start for *_, start, end in times if end > start), default=1.0)
    columns = max(1, round(played.seconds / unit))
    rows = [["."] * columns for _ in played.schedule.orders]
    for rank, action, start, end in times:
        first, last = (
            max(0, -int(-(t / unit - 0.5 - 1e-9) // 1)) for t in (start, end)
        )  # the columns whose middles are inside
        first = min(first, columns - 1)
        rows[rank][first] = f"{rows[rank][first]}+{label(action, played)}".removeprefix(".+").removeprefix("-+")
        rows[rank][first + 1 : last] = ["-"] * (min(last, columns) - first - 1)
    longest = max((len(label(action, played)) for _, action, *_ in times), default=1)
    widths = [max(longest, *map(len, column)) for column in zip(*rows)]
    digits = len(str(len(rows) - 1))
    room = width - len("rank : ") - digits
    bands, taken = [0], 0  # the first column of each
    for column, wide in enumerate(widths):
        taken += wide + 1
        if taken > room + 1 and column > bands[-1]:
            bands, taken = [*bands, column], wide + 1
    lines = [
        [
            f"rank {rank:>{digits}}: {' '.join(map(str.ljust, row[a:b], widths[a:b])).rstrip()}"
            for rank, row in enumerate(rows)
        ]
        for a, b in pairwise([*bands, columns])
    ]
    return "\n\n".join("\n".join(band) for band in lines)


def label(action: Action, played: Played) -> str:
    """Return an action as grids show it: with its stage only if ranks have several."""
    return str(action) if played.schedule.stages_per_rank > 1 else f"{action.kind}{action.micro_batch}"


def summary(played: Played) -> str:
    """Say in one line how long a run takes, how much of it is idle and how much is held."""
    peaks = played.peaks
    held = f"{min(peaks):g} to {max(peaks):g}" if min(peaks) != max(peaks) else f"{max(peaks):g}"
    bubble = f"bubble {played.bubble:.1%} ({played.bubble_in_window:.1%} in the ranks' own windows)"
    seconds = f"{played.seconds:g} s" if played.seconds >= 1 else ms(played.seconds)
    v = played.schedule.stages_per_rank
    each = f", each of its {v} stages counted" if v > 1 else ""
    return f"{played.schedule.name}: {seconds}, {bubble}, micro-batches in flight on a rank {held}{each}"
