"""A measured run beside the predicted one: seconds of every stage and rank as a table, then both as grids."""

from __future__ import annotations

from ..utils.format import column, table
from .played import Played
from .text import text

RUNS = ("predicted", "measured")


def overlay(predicted: Played, measured: Played) -> str:
    """Return the table, in milliseconds, and both grids. A stage's times are the mean of its micro-batches; a rank
    waits when it does nothing between the first action of any rank and the last one of any."""
    runs = dict(zip(RUNS, (predicted, measured)))
    rows = [["all", "first action to last", *_cells([run.seconds for run in runs.values()])]]
    for stage, rank in enumerate(predicted.schedule.rank_of_stage):
        for what, kinds in (("forward", "F"), ("backward", "BIW")):
            seconds = [_mean(run, stage, kinds) for run in runs.values()]
            rows.append([f"stage {stage}, rank {rank}", what, *_cells(seconds)])
    for rank in range(predicted.schedule.ranks):
        rows.append([f"rank {rank}", "works", *_cells([run.busy[rank] for run in runs.values()])])
        rows.append([f"rank {rank}", "waits", *_cells([run.seconds - run.busy[rank] for run in runs.values()])])
    lines = table(["ms of", "what", *RUNS, "ratio"], _once(rows), left=2)
    return "\n".join([*lines, "", text(runs)])


def _mean(run: Played, stage: int, kinds: str) -> float:
    """Return the seconds of a stage's actions of these kinds, a micro-batch."""
    found = [end - start for _, action, start, end in run if action.stage == stage and action.kind in kinds]
    return sum(found) / run.schedule.micro_batches


def _cells(seconds: list[float]) -> list[str]:
    predicted, measured = seconds
    return [*column([1e3 * s for s in seconds]), f"{measured / predicted:.2f}" if predicted > 0 else "-"]


def _once(rows: list[list[str]]) -> list[list[str]]:
    """Return the rows with a name only where it begins."""
    return [[name if n == 0 or rows[n - 1][0] != name else "", *rest] for n, (name, *rest) in enumerate(rows)]
