"""The report's drawings, as SVG: the streams of a step, and the bytes of a device over it."""

from __future__ import annotations

import numpy as np

from ..planner.objective.timeline import Event, Timeline, ends_of
from ..planner.spmd.planned import Planned
from ..plans.file import MEMORY_KINDS
from ..utils.format import byte_unit, ms, size
from .html import Html, joined, tag
from .trace import profiler_name

WIDTH, LANE, GAP = 1000.0, 26.0, 6.0
COLUMNS = 360  # of the memory chart: of the runs that fall into one, the fullest is drawn
HEIGHT = 240.0
MEMORY_CLASSES = {kind: f"memory-{kind.replace(' ', '-')}" for kind in MEMORY_KINDS}  # of report.css


def timeline_chart(planned: Planned, timeline: Timeline) -> Html:
    """Draw one lane a stream, and a mark every round number of milliseconds; what a bar is stands in its tooltip."""
    lanes = {name: i for i, name in enumerate(timeline.busy_seconds)}
    total = timeline.seconds or 1.0
    height = len(lanes) * (LANE + GAP)
    bars = []
    for event in timeline.events:
        what = (
            f"{profiler_name(planned, event)} {event.name}, {event.phase}{', recomputed' if event.recomputed else ''}"
        )
        where = f" in {event.module}" if event.module else ""
        title = tag("title", f"{what}{where}: {ms(event.duration_seconds)} from {ms(event.start_seconds)}")
        for stream in event.streams:
            bars.append(
                tag(
                    "rect",
                    title,
                    x=_x(event.start_seconds / total),
                    y=f"{lanes[stream] * (LANE + GAP) + GAP / 2:.0f}",
                    width=f"{max(WIDTH * event.duration_seconds / total, 0.05):.3g}",
                    height=f"{LANE:.0f}",
                    class_=_colour(event),
                )
            )
    drawing = _drawing([*_tick_lines(total, height), *bars], height, "compute and communication streams over the step")
    names = joined(tag("span", name, style=f"height:{LANE + GAP:.0f}px") for name in lanes)
    inner = tag("div", drawing, _time_axis(total), class_="zoomed", data_seconds=f"{total:.9g}")
    return tag("div", tag("div", names, class_="lanes"), tag("div", inner, class_="scroll"), class_="chart")


def memory_chart(planned: Planned, timeline: Timeline) -> Html:
    """Draw bytes by kind on top of each other, with the peak and, where it is near, the limit. Each kind has a colour
    of its own, the same in every report."""
    live, limit = planned.live_bytes, planned.plan.memory_limit_bytes
    ends, total = np.array(ends_of(live.order, timeline)), timeline.seconds or 1.0
    column = np.minimum((ends / total * COLUMNS).astype(int), COLUMNS - 1)
    drawn = [int(i[np.argmax(live.total[i])]) for c in range(COLUMNS) if len(i := np.flatnonzero(column == c))]
    shows_limit = limit < 1.6 * live.peak_bytes
    top = 1.06 * max(live.peak_bytes, limit if shows_limit else 0.0, 1.0)
    xs = [_x(ends[i] / total) for i in drawn[:-1]] + [_x(1.0)]  # what is there last stays to the end of the step
    below, areas = np.zeros(len(drawn)), []
    for kind, bytes_ in live.kinds.items():
        above = below + bytes_[drawn]
        outline = _stairs(xs, above, top) + _stairs(xs, below, top)[::-1]
        areas.append(
            tag(
                "path",
                tag("title", f"{kind}, at most {size(bytes_.max())}"),
                d=f"M{' L'.join(outline)} Z",
                class_=MEMORY_CLASSES[kind],
            )
        )
        below = above
    peak_x = _x(ends[live.peak_at] / total) if len(ends) else 0
    marks = [tag("line", x1=peak_x, x2=peak_x, y1=0, y2=HEIGHT, class_="peak")]
    if shows_limit:
        marks.append(tag("line", x1=0, x2=WIDTH, y1=_y(limit, top), y2=_y(limit, top), class_="limit"))
    unit, scale = byte_unit(top)
    heights = _ticks(top / scale)
    lines = [tag("line", x1=0, x2=WIDTH, y1=_y(t * scale, top), y2=_y(t * scale, top), class_="tick") for t in heights]
    names = joined(tag("span", f"{t:g} {unit}", style=f"top:{_y(t * scale, top)}px") for t in heights)
    drawing = _drawing([*_tick_lines(total, HEIGHT), *lines, *areas, *marks], HEIGHT, "bytes of a device over the step")
    run = live.order.runs[live.peak_at] if len(ends) else None
    at = f" at {planned.whole[0].vertices[run.vertex].name}, {run.phase}" if run else ""
    near = f"the red line is the limit, {size(limit)}" if shows_limit else f"the limit, {size(limit)}, is far above"
    peak = f"The dashed line is the peak, {size(live.peak_bytes)}{at}; {near}."
    caption = f"{peak} Beside each kind is the most of it over the step."
    legend = [(MEMORY_CLASSES[kind], f"{kind} {size(b.max())}") for kind, b in live.kinds.items()]
    chart = tag("div", tag("div", names, class_="heights"), tag("div", drawing, _time_axis(total)), class_="chart")
    return joined([chart, legend_of(legend), tag("p", caption, class_="note")])


def _stairs(xs: list[str], bytes_: np.ndarray, top: float) -> list[str]:
    """Return the corners of a line that has the n-th value up to the n-th place."""
    ys = [_y(y, top) for y in bytes_]
    return [corner for before, x, y in zip(["0", *xs], xs, ys) for corner in (f"{before},{y}", f"{x},{y}")]


def legend_of(entries: list[tuple[str, str]]) -> Html:
    """Return a legend with the colour and name of each class."""
    return tag("div", *(tag("span", tag("i", class_=c), name) for c, name in entries), class_="legend")


def _drawing(shapes: list[Html], height: float, label: str) -> Html:
    """Put shapes in a space of WIDTH by `height`, stretched to the width that the page has."""
    return tag(
        "svg",
        *shapes,
        viewBox=f"0 0 {WIDTH:.0f} {height:.0f}",
        preserveAspectRatio="none",
        style=f"height:{height:.0f}px",
        role="img",
        aria_label=label,
    )


def _colour(event: Event) -> str:
    if event.step is not None:
        return event.step.move.kind
    return "again" if event.recomputed else event.phase


def _x(share: float) -> str:
    return f"{WIDTH * share:.2f}".rstrip("0").rstrip(".")


def _y(bytes_: float, top: float) -> str:
    return f"{HEIGHT * (1 - bytes_ / top):.1f}"


def _time_axis(total: float) -> Html:
    """Write 0 and the round times below a drawing of `total` seconds. Those at its ends stay inside of it."""
    marks = [tag("span", "0", class_="first")]
    for t in _ticks(total):
        text = f"{t:g} s" if total >= 10 else f"{1e3 * t:g} ms"
        marks.append(
            tag("span", text, style=f"left:{100 * t / total:.2f}%", class_="last" if t > 0.9 * total else None)
        )
    return tag("div", *marks, class_="axis")


def _tick_lines(total: float, height: float) -> list[Html]:
    """Draw an upright line at each of the round times."""
    return [
        tag("line", x1=_x(t / total), x2=_x(t / total), y1=0, y2=f"{height:.0f}", class_="tick") for t in _ticks(total)
    ]


def _ticks(total: float) -> list[float]:
    """Return up to five round numbers between 0 and `total`."""
    step = 10.0 ** np.floor(np.log10(total))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if total / s < 5.5)
    return [step * i for i in range(1, int(total * 0.97 / step) + 1)]
