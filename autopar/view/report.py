"""`autopar report`: a plan as one HTML page that needs no network and no other file."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path

from ..planner.explain import runners_up
from ..planner.objective.timeline import Timeline
from ..planner.spmd.planned import Planned
from ..plans.attentions import attention_table
from ..plans.entries import Region
from ..plans.loops import loop_lines
from ..plans.plan import Plan
from ..plans.routing import routing_lines
from ..plans.text import (
    alternatives_table,
    costed,
    hidden_seconds,
    in_tree_order,
    memory_table,
    meshes_table,
    offloaded_lines,
    recomputed_lines,
    tiled_lines,
    without_price,
)
from ..plans.wording import wording
from ..utils.format import byte_column, column, count_text, ms, percent, size
from .charts import legend_of, memory_chart, timeline_chart
from .html import Html, bar, joined, rows_of, tag

FOLDER = Path(__file__).parent


def report_page(planned: Planned, timeline: Timeline | None = None) -> str:
    """Return the whole page. `timeline`: another one than the plan's own, such as with a slowdown."""
    plan, timeline = planned.plan, planned.timeline if timeline is None else timeline
    sections = [
        ("What it costs", _summary(planned, timeline)),
        ("Against the experts' strategies", alternatives_section(plan)),
        ("Meshes tried", _meshes(plan)),
        (
            "The step" if plan.micro_batches == 1 else f"One of the step's {plan.micro_batches} micro-batches",
            _step(planned, timeline),
        ),
        ("Memory of a device", joined([memory_chart(planned, timeline), _memory(plan)])),
        ("Attention", attentions_section(plan)),
        ("Collectives", collectives_section(plan)),
        ("Modules", modules_section(plan)),
        ("Parameters and inputs", layouts_section(planned)),
        ("Notes", notes_section(plan)),
    ]
    return whole_page(plan, sections)


def whole_page(plan: Plan, sections: list[tuple[str, Html | None]]) -> str:
    """Return the page of a plan: the seconds of a step as its headline, then the sections that have a content."""
    title = f"{plan.model} on mesh {plan.mesh}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Html((FOLDER / "report.css").read_text())),
    )
    devices = f"{plan.mesh.devices} device{'s' if plan.mesh.devices > 1 else ''}"
    made = f"{devices}, {plan.hardware}, {plan.precision_text}, {plan.optimizer_text}, strategy {plan.strategy}"
    step = tag("p", tag("b", ms(plan.step_seconds)), f" a step of {samples_text(plan)}, predicted", class_="headline")
    main = [
        tag(
            "header",
            tag("h1", title),
            tag("p", made),
            step,
            tag("p", f"{wording(plan).bound(plan)} (gap {plan.gap:.2%})"),
        )
    ]
    main += [tag("section", tag("h2", name), content) for name, content in sections if content]
    body = tag("body", tag("main", *main), tag("script", Html((FOLDER / "report.js").read_text())))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _summary(planned: Planned, timeline: Timeline) -> Html:
    plan = planned.plan
    shown = [
        ("played", *_overlapped(planned, timeline)),
        ("compute", ms(plan.compute_seconds), _recomputed(plan)),
        ("communication", ms(plan.communication_seconds), _communicated(plan)),
        ("peak memory", size(plan.peak_bytes), f"{percent(plan.peak_bytes, plan.memory_limit_bytes)} of "
         f"{size(plan.memory_limit_bytes)}"),
        ("parameters", count_text(plan.parameter_elements),
         f"{plan.trained_elements:,} of {plan.parameter_elements:,} trained"),
    ]  # fmt: skip
    if plan.update_seconds:
        shown.insert(3, ("optimizer", ms(plan.update_seconds), f"{plan.optimizer_text}, through memory"))
    if plan.offloaded.parameters:
        shown.insert(3, ("offload", ms(plan.offloaded.seconds), f"{plan.offloaded.parameters} parameters on the host"))
    return cards(shown)


def samples_text(plan: Plan) -> str:
    """Return the batch of a step as text."""
    return f"{plan.samples:,} sample{'s' if plan.samples != 1 else ''}"


def cards(shown: list[tuple[str, str, str]]) -> Html:
    """Show (name, value, note) next to each other."""
    return tag(
        "div",
        *(tag("div", tag("b", value), tag("span", name), tag("small", note)) for name, value, note in shown),
        class_="cards",
    )


def _overlapped(planned: Planned, timeline: Timeline) -> tuple[str, str]:
    """Return the time of the step and a note; of another timeline than the plan's own, that of its pass."""
    plan, own = planned.plan, timeline is planned.timeline
    if own:
        return ms(plan.step_seconds), f"{ms(plan.exposed_seconds)} of communication exposed"
    seconds = timeline.seconds + (plan.offloaded.seconds + plan.update_seconds if plan.micro_batches == 1 else 0.0)
    what = "" if plan.micro_batches == 1 else f"one of {plan.micro_batches} micro-batches, "
    return ms(seconds), f"{what}{ms(timeline.exposed_seconds)} of communication exposed"


def _communicated(plan: Plan) -> str:
    """Say how many collectives there are, and how much of the step's parts is hidden behind others."""
    count = sum(c.count for c in plan.collectives)
    return f"{count} collectives" + (f", {ms(hidden)} hidden" if (hidden := hidden_seconds(plan)) else "")


def _recomputed(plan: Plan) -> str:
    return f"and {ms(plan.recompute_seconds)} recomputed" if plan.recompute_seconds else "nothing recomputed"


def alternatives_section(plan: Plan) -> Html | None:
    """Show the costs of the plan and its alternatives, and notes on those without a price; None if there are none."""
    if not plan.alternatives:
        return None
    shown, (header, cells) = costed(plan), alternatives_table(plan)
    longest = max(a.step_seconds for a in shown) or 1.0
    bars = [bar(a.step_seconds / longest, "bar" if a.fits else "bar unfit") for a in shown]
    rows = [[name, drawn, *rest] for drawn, (name, *rest) in zip(bars, cells)]
    notes = joined(tag("p", note, class_="note") for note in without_price(plan))
    return tag("div", rows_of(["strategy", "step", *header], rows, left=2, bars=1), notes, class_="others")


def _meshes(plan: Plan) -> Html | None:
    return rows_of(*meshes_table(plan)) if plan.meshes else None


def _step(planned: Planned, timeline: Timeline) -> Html:
    kinds = [("forward", "forward"), ("backward", "backward"), ("again", "recomputed"), ("slice", "local copy")]
    kinds += [(kind, kind) for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")]
    found = {e.step.move.kind if e.step else "again" if e.recomputed else e.phase for e in timeline.events}
    zooms = (("−", 0.5), ("+", 2), ("all", 0))
    buttons = [tag("button", text, type="button", data_zoom=zoom) for text, zoom in zooms]
    busy = rows_of(["stream", "busy", "busy ms", "share"], [
        [name, bar(seconds / (timeline.seconds or 1.0)), milliseconds, percent(seconds, timeline.seconds)]
        for (name, seconds), milliseconds in zip(timeline.busy_seconds.items(),
                                                 column([1e3 * s for s in timeline.busy_seconds.values()]))
    ], left=2, bars=1)  # fmt: skip
    lines = recomputed_lines(planned.plan) + tiled_lines(planned.plan)
    notes = joined(tag("p", f"{line[0].upper()}{line[1:]}", class_="note") for line in lines)
    controls = tag(
        "div", legend_of([k for k in kinds if k[0] in found]), tag("span", *buttons, class_="zoom"), class_="controls"
    )
    return joined([controls, timeline_chart(planned, timeline), notes, busy])


def _memory(plan: Plan) -> Html:
    header, cells = memory_table(plan)
    bytes_ = plan.at_peak | {"in all": plan.peak_bytes}
    rows = [[kind, bar(bytes_.get(kind, 0.0) / (plan.peak_bytes or 1.0)), *rest] for kind, *rest in cells]
    return rows_of(["what the plan charges", "at the peak", *header], rows, left=2, bars=1)


def attentions_section(plan: Plan) -> Html | None:
    """Show the scheme of each attention whose sequence is cut, with its pairs and bytes; None if there are none."""
    header, rows = attention_table(plan.attentions)
    return rows_of(header, rows, left=2) if rows else None


def collectives_section(plan: Plan) -> Html | None:
    """Show the collectives of a step by axes, with their time, number and bytes; None if there are none."""
    if not plan.collectives:
        return None
    unit, sent = byte_column([c.wire_bytes for c in plan.collectives])
    longest = max(c.seconds for c in plan.collectives) or 1.0
    milliseconds = column([c.seconds * 1e3 for c in plan.collectives])
    each = byte_column([c.wire_bytes / max(c.count, 1) for c in plan.collectives])
    rows = [
        [
            ",".join(c.axes),
            f"{c.phase} {c.kind}",
            bar(c.seconds / longest, f"bar {c.kind}"),
            c.count,
            bytes_,
            mean,
            seconds,
        ]
        for c, bytes_, mean, seconds in zip(plan.collectives, sent, each[1], milliseconds)
    ]
    rows.sort(key=lambda row: row[0])
    return rows_of(
        ["axes", "collective", "time", "count", f"{unit} sent", f"{each[0]} each", "ms"], rows, left=3, bars=2
    )


def modules_section(plan: Plan) -> Html:
    """Show modules inside of each other; a closed one shows the sums of all that is in it."""
    regions = in_tree_order(plan.regions)
    digits, recomputed = _Digits(regions), _recomputed_rows(plan)
    children: dict[str, list[str]] = defaultdict(list)
    by_name = {r.name: r for r in regions}
    for name in by_name:
        words = name.split(".") if not name.startswith("(") else [name]
        for depth in range(1, len(words) + 1):
            parent, child = ".".join(words[: depth - 1]), ".".join(words[:depth])
            if child not in children[parent]:
                children[parent].append(child)

    def subtree(name: str) -> list[Region]:
        own = [by_name[name]] if name in by_name else []
        return own + [r for child in children.get(name, ()) for r in subtree(child)]

    def node(name: str, depth: int) -> Html:
        inside, region = subtree(name), by_name.get(name)
        copies = max((r.copies for r in inside), default=1) if "*" in name else 1
        layouts = [tag("small", recomputed[name], class_="badge")] if name in recomputed else []
        layouts += [tag("code", region.weights, title="weights")] if region and region.weights else []
        layouts += (
            [tag("code", region.activations, title="activations", class_="quiet")]
            if region and region.activations
            else []
        )
        label = tag(
            "span", tag("b", name.rpartition(".")[2] if depth else name), f" ×{copies}" if copies > 1 else "", *layouts
        )
        line = [label, *digits.cells(inside)]
        if not children.get(name):
            return tag("div", *line, class_="row")
        inner = joined(node(child, depth + 1) for child in children[name])
        return tag("details", tag("summary", *line, class_="row"), inner, open=depth < 2)

    label = tag("span", "module", tag("code", "its weights"), tag("code", "its activations", class_="quiet"))
    header = tag("div", label, *(tag("em", name) for name in digits.header), class_="row head")
    note = tag(
        "p",
        f"{digits.unit}: what a device holds of the parameters, gradients and optimizer state, and what is "
        f"saved for "
        "the backward.",
        class_="note",
    )
    return joined([tag("div", header, *(node(name, 0) for name in children[""]), class_="tree"), note])


def _recomputed_rows(plan: Plan) -> dict[str, str]:
    """Say, by row of the modules, how many of its blocks run again."""
    words: dict[str, list[str]] = defaultdict(list)
    for how, blocks in (("recomputed", plan.recomputed), ("recomputed in part", plan.recomputed_selectively)):
        for name, count in Counter(_folded(b) for b in blocks).items():
            words[name].append(f"{count} {how}")
    return {name: ", ".join(texts) for name, texts in words.items()}


def _folded(name: str) -> str:
    """Return a name with the numbers in it as `*`."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


class _Digits:
    """Compute, communication and bytes of groups of regions, in the units and decimals that suit the sum."""

    def __init__(self, regions: list[Region]):
        self.unit, _ = byte_column([sum(r.bytes_ for r in regions)])
        self.whole = sum(r.bytes_ for r in regions)
        self.seconds = sum(r.compute_seconds + r.communication_seconds for r in regions)
        self.header = ["compute ms", "comm ms", self.unit]

    def cells(self, regions: list[Region]) -> list[Html]:
        """Return the compute and communication milliseconds and the bytes of a group as cells."""
        seconds = [sum(r.compute_seconds for r in regions), sum(r.communication_seconds for r in regions), self.seconds]
        compute, communication, _ = column([1e3 * s for s in seconds])
        bytes_ = byte_column([sum(r.bytes_ for r in regions), self.whole])[1][0]
        return [tag("em", x) for x in (compute, communication, bytes_)]


def layouts_section(planned: Planned) -> Html:
    """Show the layouts of parameters and inputs, equal blocks once, with what they beat."""
    second = _runners_up(planned)
    shapes = {
        v.node.meta["role"].name: tuple(v.values[0].shape)
        for v in planned.whole[0].vertices
        if v.kind in ("parameter", "input")
    }
    rows: dict[tuple, int] = defaultdict(int)
    for name, layout in planned.plan.layouts.items():
        rows[_folded(name), shapes.get(name, ()), layout, second.get(name, ("-", 0.0))] += 1
    milliseconds = column([1e3 * seconds for *_, (_, seconds) in rows])
    lines = [
        [
            f"{name} ×{n}" if n > 1 else name,
            tag("code", layout),
            tag("code", other, class_="quiet") if more != "-" else "-",
            more,
            str(shape),
        ]
        for ((name, shape, layout, (other, _)), n), more in zip(rows.items(), milliseconds)
    ]
    note = tag(
        "p",
        "The next best layout of all equal parameters together costs about so much more a step at least: "
        "bounds of the "
        "search, the price of scarce memory included. A dash: the bounds do not rank the others. autopar "
        "explain prices "
        "whole plans.",
        class_="note",
    )
    return tag(
        "div",
        rows_of(["name", "layout", "next best", "ms more", "global shape"], lines, left=3),
        note,
        class_="layouts",
    )


def _runners_up(planned: Planned) -> dict[str, tuple[str, float]]:
    """Return `runners_up` by the names of the whole model, where a block that was planned may stand for many. Those
    that cost 0 by their bounds are left out: which of them is next is not known."""
    problem, second = planned.problem, runners_up(planned)
    return {
        node.meta["role"].name: second[name]
        for v in problem.vertices
        if v.kind in ("parameter", "input") and second.get(name := v.node.meta["role"].name, ("", 0.0))[1] > 0
        for node in problem.whole_nodes(v.node, planned.evaluation.first)
    }


def notes_section(plan: Plan) -> Html | None:
    """List what is said of passes, of offloading, of experts' rows and of loops, and the plan's warnings; None if there
    is nothing."""
    said = (*wording(plan).batches(plan), *offloaded_lines(plan), *routing_lines(plan), *loop_lines(plan))
    notes = [f"{line[0].upper()}{line[1:]}" for line in (*said, *plan.warnings)]
    return tag("ul", *(tag("li", note) for note in notes)) if notes else None
