"""`autopar report` on a mesh with pp: stages, the schedule as it is predicted, memory of the ranks, what else was
possible, and how a stage is sharded inside."""

from __future__ import annotations

from ..planner.explain_pipeline import PipelineExplanation
from ..planner.explain_pipeline_text import inside_lines, priced_table
from ..planner.pipeline.evaluate import PipelineCost
from ..planner.spmd.planned import Planned
from ..plans.file import MEMORY_KINDS
from ..plans.pipeline_text import pipeline_line
from ..plans.plan import Plan
from ..plans.text import in_order, waiting_seconds
from ..schedule.svg import svg
from ..utils.format import byte_column, column, count_text, ms, percent, size
from .charts import MEMORY_CLASSES, legend_of
from .html import Html, bar, joined, rows_of, tag
from .report import (
    alternatives_section,
    attentions_section,
    cards,
    collectives_section,
    layouts_section,
    modules_section,
    notes_section,
    whole_page,
)

PICTURE = 1100  # pixels of the schedule, as wide as the page


def pipeline_page(planned: Planned, explanation: PipelineExplanation | None = None) -> str:
    """Return the whole page; `explanation`: what other micro-batches, schedules and cuts would cost."""
    plan = planned.plan
    inside = tag("p", f"{inside_lines(plan)[0]}.", class_="note")
    sections = [
        ("What it costs", _summary(plan)),
        ("Stages", _stages(planned.stages.evaluated)),
        ("The step as it is predicted", _schedule(plan)),
        ("Memory of the ranks at their peaks", _memory(planned)),
        ("Other micro-batches, schedules and cuts", _explained(explanation)),
        ("Everything that was tried", alternatives_section(plan)),
        ("Inside of the stages: modules", joined([inside, modules_section(planned.inner.plan)])),
        ("Inside of the stages: attention", attentions_section(plan)),
        ("Inside of the stages: collectives of a step", collectives_section(plan)),
        ("Inside of the stages: parameters and inputs", layouts_section(planned.inner)),
        ("Notes", notes_section(plan)),
    ]
    return whole_page(plan, sections)


def _summary(plan: Plan) -> Html:
    p = plan.pipeline
    trained = f"{plan.trained_elements:,} of {plan.parameter_elements:,} trained"
    shown = [
        ("micro-batches × samples", f"{p.micro_batches} × {-(-plan.samples // p.micro_batches)}",
         p.schedule.replace("_", " ")),
        ("stages", str(len(p.costs)), f"slowest {p.balance:.2f} times the mean"),
        ("waiting", ms(waiting_seconds(plan)), f"of the mean rank, bubble {percent(p.played().bubble, 1.0)}"),
        ("peak memory", size(plan.peak_bytes),
         f"{percent(plan.peak_bytes, plan.memory_limit_bytes)} of {size(plan.memory_limit_bytes)}"),
        ("parameters", count_text(plan.parameter_elements), trained),
    ]  # fmt: skip
    return cards(shown)


def _stages(evaluated: PipelineCost) -> Html:
    p = evaluated.pipeline
    seconds = [(c.forward_seconds, c.input_seconds, c.weight_seconds) for c in p.costs]
    slowest = max(map(sum, seconds)) or 1.0
    times = column([1e3 * s for three in seconds for s in three])
    sent_unit, sent = byte_column([c.sent_bytes for c in p.costs])
    state_unit, state = byte_column([c.state_bytes for c in p.costs])
    saved_unit, saved = byte_column([c.activation_bytes for c in p.costs])
    rows = [
        [
            s,
            bar(sum(seconds[s]) / slowest),
            c.name,
            p.orders.rank_of_stage[s],
            f"{c.parameters:,}",
            *times[3 * s : 3 * s + 3],
            sent[s],
            state[s],
            saved[s],
            f"{evaluated.played.peak_of_stage(s) / c.activation_bytes:.0f}" if c.activation_bytes else "-",
        ]
        for s, c in enumerate(p.costs)
    ]
    header = ["stage", "seconds", "holds", "rank", "parameters", "F ms", "B ms", "W ms", f"{sent_unit} sent",
              f"state {state_unit}", f"saved {saved_unit}", "in flight"]  # fmt: skip
    note = tag(
        "p",
        "Of one micro-batch on a device: F forward, B gradient of the stage's input, W gradients of its "
        "parameters; "
        "state: parameters, gradients, optimizer; saved: kept for the backward by each micro-batch in flight.",
        class_="note",
    )
    return joined([rows_of(header, rows, left=3, bars=1), note])


def _schedule(plan: Plan) -> Html:
    picture = Html(svg(plan.pipeline.played(), f"{plan.model} on mesh {plan.mesh}, predicted", PICTURE))
    several = " The second stage of a rank is lighter." if plan.pipeline.stages_per_rank > 1 else ""
    return joined([tag("p", f"{pipeline_line(plan)}.{several}", class_="note"), tag("div", picture, class_="scroll")])


def _memory(planned: Planned) -> Html:
    """Return a table with a bar and a row for each rank, by kind."""
    memory, limit = [in_order(m) for m in planned.stages.evaluated.memory], planned.plan.memory_limit_bytes
    kinds = [k for k in MEMORY_KINDS if any(k in m for m in memory)]
    totals = [sum(m.values()) for m in memory]
    unit, cells = byte_column([b for m, total in zip(memory, totals) for b in (*(m.get(k, 0.0) for k in kinds), total)])
    width = len(kinds) + 1
    rows = []
    for rank, (held, total) in enumerate(zip(memory, totals)):
        shares = {k: f"width:{100 * held.get(k, 0.0) / max(totals):.2f}%" for k in kinds}
        drawn = tag(
            "div",
            *(tag("i", class_=MEMORY_CLASSES[k], style=share, title=k) for k, share in shares.items()),
            class_="stack",
        )
        stages = ", ".join(map(str, planned.stages.evaluated.pipeline.stages_of(rank)))
        *parts, whole = cells[rank * width : (rank + 1) * width]
        rows.append([rank, drawn, stages, whole, percent(total, limit), *parts])
    header = ["rank", f"{unit} of a device", "stages", "in all", "of the limit", *kinds]
    return joined([legend_of([(MEMORY_CLASSES[k], k) for k in kinds]), rows_of(header, rows, left=2, bars=1)])


def _explained(e: PipelineExplanation | None) -> Html | None:
    if e is None:
        return None
    p = e.plan.pipeline
    tables = {
        f"micro-batches, with {p.schedule}": e.micro_batches,
        f"schedules, with {p.micro_batches} micro-batches": e.schedules, "cuts into stages": e.cuts,
    }  # fmt: skip
    parts = []
    for title, priced in tables.items():
        header, rows = priced_table(priced)
        longest = max(one.step_seconds for one in priced) or 1.0
        bars = [bar(one.step_seconds / longest, "bar" if one.fits else "bar unfit") for one in priced if not one.note]
        cells = [[name, drawn, *rest] for drawn, (name, *rest) in zip(bars, rows)]
        parts.append(rows_of([title, "", *header], cells, left=1, bars=1))
        parts += [tag("p", f"{one.text}: {one.note}", class_="note") for one in priced if one.note]
    note = tag(
        "p",
        "* as planned. Works, reduces (gradients, after the last action) and waits are the mean rank's and "
        "add up to "
        "the step. Other schedules and cuts are for the same plan of a micro-batch.",
        class_="note",
    )
    return joined([*parts, note])
