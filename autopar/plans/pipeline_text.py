"""The part of a plan's text that is about its pipeline: the schedule, a table of its stages, and a small schedule as a
grid."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..schedule.text import grid
from ..utils.format import byte_column, column, percent, table, text_width
from .entries import StageSharding
from .pipeline import sizes_of

if TYPE_CHECKING:
    from .plan import Plan

MOST_RANKS, MOST_MICRO_BATCHES = 8, 8  # of a schedule that is drawn
COLUMNS, FEWEST = 40, 20


def pipeline_line(plan: Plan) -> str:
    """Return the schedule, how much of it is idle, and how even the stages are, in one line."""
    p = plan.pipeline
    stages = f"{p.ranks} ranks along {p.axis}" + (
        f" with {p.stages_per_rank} stages each" if p.stages_per_rank > 1 else ""
    )
    bubble = percent(p.played().bubble, 1.0)
    return (
        f"{p.schedule}: {stages}, {batches_text(plan)}, bubble {bubble}, slowest stage {p.balance:.2f} times the mean"
    )


def batches_text(plan: Plan) -> str:
    """Return how many micro-batches there are of how many samples, as "4 micro-batches of 3 and 2 samples"."""
    m = plan.micro_batches
    chunks = plan.pipeline.row_chunks
    sizes = " and ".join(str(size) for size in sorted({*sizes_of(plan.samples, m // chunks)}, reverse=True))
    if chunks > 1:
        return f"{m} micro-batches, each one of {chunks} chunks of the tokens of {sizes} samples"
    return f"{m} micro-batch{'es' if m > 1 else ''} of {sizes} samples"


def pipeline_lines(plan: Plan) -> list[str]:
    """Return the table of the stages, that of their shardings if those differ, and the grid of a small schedule."""
    p = plan.pipeline
    if not p.costs:
        return []
    rank_of = p.orders.rank_of_stage
    seconds = [(c.forward_seconds, c.input_seconds + c.weight_seconds, c.weight_seconds) for c in p.costs]
    times = column([s * 1e3 for three in seconds for s in three])
    unit, sent = byte_column([c.sent_bytes for c in p.costs])
    peak_unit, peaks = byte_column([c.peak_bytes for c in p.costs])
    rows = zip(
        [str(i) for i in range(len(p.costs))],
        [c.name for c in p.costs],
        [str(r) for r in rank_of],
        [f"{c.parameters:,}" for c in p.costs],
        times[::3],
        times[1::3],
        times[2::3],
        sent,
        peaks,
    )
    backward = ["backward ms", "of it weights"]
    header = ["stage", "holds", "rank", "parameters", "forward ms", *backward, f"{unit} sent", f"peak {peak_unit}"]
    lines = table(header, list(rows), left=2) + sharding_lines(plan)
    if p.ranks <= MOST_RANKS and p.micro_batches <= MOST_MICRO_BATCHES:
        played, width = p.played(), text_width()
        for columns in range(COLUMNS, FEWEST - 1, -1):  # as many as fit
            drawn = grid(played, played.seconds / columns or None, width).splitlines()
            if len(drawn) == p.ranks:
                break
        lines += ["", *drawn]
    return lines


def sharding_lines(plan: Plan) -> list[str]:
    """Return a table of what is sharded otherwise from stage to stage, none if all stages are sharded alike."""
    if not plan.shardings:
        return []
    rows = [[what, *(s.layouts[what] or "-" for s in plan.shardings)] for what in plan.shardings[0].layouts]
    header = ["stages are sharded apart", *map(stages_text, plan.shardings)]
    return ["", *table(header, rows, left=len(header))]


def stages_text(sharding: StageSharding) -> str:
    """Return the stages of a sharding, as "stages 0 to 3, 6"."""
    runs: list[list[int]] = []
    for stage in sharding.stages:
        if runs and stage == runs[-1][-1] + 1:
            runs[-1].append(stage)
        else:
            runs.append([stage])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return f"stage{'s' if len(sharding.stages) > 1 else ''} {', '.join(texts)}"
