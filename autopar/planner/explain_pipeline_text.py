"""The text of a pipeline's explanation: what each rank does, and what other micro-batches, schedules and cuts would
cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..plans.pipeline_text import pipeline_line
from ..plans.plan import Plan
from ..plans.routing import routing_lines
from ..utils.format import byte_column, column, ms, percent, size, table
from .explain_text import explain_text

if TYPE_CHECKING:
    from .explain_pipeline import PipelineExplanation, Priced


def explain_pipeline_text(e: PipelineExplanation) -> str:
    """Return the text of an explanation: what each rank does, then a table each of micro-batches, schedules and
    cuts."""
    p = e.plan.pipeline
    lines = [
        f"pipeline of {e.plan.model} on mesh {e.plan.mesh}: step {ms(e.plan.step_seconds)}, peak "
        f"{size(e.plan.peak_bytes)} a device, {percent(e.plan.peak_bytes, e.plan.memory_limit_bytes)} of "
        f"{size(e.plan.memory_limit_bytes)}",
        pipeline_line(e.plan), *routing_lines(e.plan), "", *_ranks(e), "",
        "* as planned; works, reduces (gradients, after the last action) and waits are the mean rank's and add up to "
        "the step", "",
        *priced_lines(f"micro-batches, with {p.schedule}", e.micro_batches), "",
        *priced_lines(f"schedules, with {p.micro_batches} micro-batches", e.schedules), "",
        *priced_lines("cuts into stages", e.cuts),
    ]  # fmt: skip
    if e.borders_left_out:
        lines.append(f"borders of faster stages that are left out: {e.borders_left_out}")
    if e.inside is not None:
        lines += ["", *inside_lines(e.plan), explain_text(e.inside).rstrip("\n")]
    return "\n".join(lines) + "\n"


def inside_lines(plan: Plan) -> list[str]:
    """Say what the seconds of an explanation inside of stages are of."""
    p = plan.pipeline
    return [f"inside of the stages: seconds of one of {p.micro_batches} micro-batches through all stages, as if one "
            f"rank along {p.axis} had them all; a rank has 1/{p.ranks} of it"]  # fmt: skip


def _ranks(e: PipelineExplanation) -> list[str]:
    unit, peaks = byte_column([r.peak_bytes for r in e.ranks])
    seconds = column(
        [1e3 * s for r in e.ranks for s in (r.forward_seconds, r.backward_seconds, r.reduces_seconds, r.waits_seconds)]
    )
    names = [c.name for c in e.plan.pipeline.costs]
    rows = [
        [
            str(rank),
            "; ".join(f"{s}: {names[s]}" for s in r.stages),
            *seconds[4 * rank : 4 * rank + 4],
            peaks[rank],
            percent(r.peak_bytes, e.plan.memory_limit_bytes),
        ]
        for rank, r in enumerate(e.ranks)
    ]
    return table(
        ["rank", "stages", "forward ms", "backward ms", "reduces", "waits", f"peak {unit}", "of the limit"],
        rows,
        left=2,
    )


def priced_lines(title: str, priced: Sequence[Priced]) -> list[str]:
    """Return a table in which a star marks the planned one, with each step over the planned one's, and then the notes
    of those that have no price."""
    header, rows = priced_table(priced)
    notes = [f"  {one.text}: {one.note}" for one in priced if one.note]
    return table([title, *header], rows) + notes


def priced_table(priced: Sequence[Priced]) -> tuple[list[str], list[list[str]]]:
    """Return (header without the first column, rows) of those that have a price."""
    shown = [one for one in priced if not one.note]
    base = next(one.step_seconds for one in shown if one.chosen)
    unit, bytes_ = byte_column([one.peak_bytes for one in shown])
    parts = ("step_seconds", "works_seconds", "reduces_seconds", "waits_seconds")
    cells = column([1e3 * getattr(one, part) for one in shown for part in parts])
    rows = [
        [f"{'*' if one.chosen else ' '} {one.text}", *cells[4 * i : 4 * i + 4], bytes_[i], against(one, base)]
        for i, one in enumerate(shown)
    ]
    return ["step ms", "= works", "+ reduces", "+ waits", f"peak {unit}", "step"], rows


def against(one: Priced, base: float) -> str:
    """Return as text how many times as long as `base` a step takes, or that it does not fit."""
    if not one.fits:
        return "does not fit"
    return f"{one.step_seconds / base:.2f}x" if base else "-"
