"""Schedules as an SVG picture: a row a rank, a box an action with its micro-batch's number, times to scale."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape

from ..utils.format import ms
from .actions import KINDS
from .played import Played

ROW, GAP, LEFT, BOX = 24, 4, 62, 22  # pixels; BOX: the shortest action, if the whole then fits into WIDEST
CAPTION = 26  # over each of several runs
LINE, LETTER = 18, 6.8  # of the legend: the height of a line, the width of a letter
NARROWEST, WIDEST = 520, 4000
FAR_LONGER = 4.0  # times as long as the shortest run: on one scale nothing could be seen of that
PAGE = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    "<title>{}</title><style>"
    'body {{ margin: 16px; background: #fff; overflow-x: auto; }} h1 {{ font: 600 17px system-ui, "DejaVu Sans"; }}'
    "@media (prefers-color-scheme: dark) {{ body {{ background: #12151b; color: #e6e9ef; }} }}</style>"
    "<h1>{}</h1>\n{}\n</html>\n"
)
STYLE = """
.pipeline { font: 12px system-ui, "DejaVu Sans", sans-serif; --text: #1c2330; --idle: #eef0f4;
  --F: #5b8def; --B: #8a7ae0; --I: #2fa58b; --W: #e0a63c; }
.pipeline text { fill: var(--text); }
.pipeline .number { fill: #10141b; text-anchor: middle; pointer-events: none; }
.pipeline .idle { fill: var(--idle); }
.pipeline .F { fill: var(--F); } .pipeline .B { fill: var(--B); } \
.pipeline .I { fill: var(--I); } .pipeline .W { fill: var(--W); }
.pipeline .odd { fill-opacity: 0.6; }
@media (prefers-color-scheme: dark) { .pipeline { --text: #e6e9ef; --idle: #232933; }
  .pipeline .odd { fill-opacity: 1; filter: brightness(1.18); } }
"""


def svg(played: Played | Mapping[str, Played], title: str | None = None, widest: float = WIDEST) -> str:
    """Return the picture, with no file or font it depends on; of several runs by their names, one below the other, on
    one scale unless one takes many times as long. The second, fourth, ... stage of a rank has a lighter colour.
    `widest`: pixels."""
    runs = {"": played} if isinstance(played, Played) else dict(played)
    some = next(iter(runs.values()))
    shortest = min((end - start for run in runs.values() for *_, start, end in run if end > start), default=1.0)
    longest = max(run.seconds for run in runs.values()) or 1.0
    is_one_scale = longest <= FAR_LONGER * min(run.seconds for run in runs.values())
    scale = max(min(BOX / shortest, (widest - LEFT) / longest), (NARROWEST - LEFT) / longest)
    title = some.schedule.name if title is None else title
    width = LEFT + longest * scale + 8
    parts, top = _legend(list(runs.values()), width)
    for name, run in runs.items():
        if name:
            said = (
                f"{name}: {ms(run.seconds)}, bubble {run.bubble:.1%}{'' if is_one_scale else ', on a scale of its own'}"
            )
            parts.append(f'<text x="4" y="{top + 14}">{escape(said)}</text>')
            top += CAPTION
        parts += _rows(run, top, scale if is_one_scale else scale * longest / (run.seconds or 1.0))
        top += run.schedule.ranks * (ROW + GAP) + 4
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="pipeline" width="{width:.0f}" height="{top}" '
        f'viewBox="0 0 {width:.0f} {top}" role="img"><title>{escape(title)}</title><style>{STYLE}</style>'
    )
    return "\n".join([head, *parts, "</svg>"])


def _legend(runs: list[Played], width: float) -> tuple[list[str], float]:
    """Return what the colours and numbers mean, in as many lines as the width needs, and where it ends."""
    used = [kind for kind in KINDS if any(action.kind == kind for run in runs for _, action, *_ in run)]
    entries = [(kind, KINDS[kind]) for kind in used]
    if any(run.schedule.stages_per_rank > 1 for run in runs):
        entries.append((f"{used[0]} odd", "lighter: every second stage of a rank"))
    entries += [("idle", "the rank waits"), ("", "number: the micro-batch")]
    parts, x, y = [], float(LEFT), 8
    for class_, said in entries:
        box = 17 if class_ else 0
        wide = box + LETTER * len(said) + 16
        if x > LEFT and x + wide > width:
            x, y = float(LEFT), y + LINE
        if class_:
            parts.append(f'<rect class="{class_}" x="{x:.0f}" y="{y}" width="12" height="12" rx="2"/>')
        parts.append(f'<text x="{x + box:.0f}" y="{y + 10}">{said}</text>')
        x += wide
    return parts, y + LINE + 8


def page(played: Played | Mapping[str, Played], title: str) -> str:
    """Return the picture as an HTML page."""
    return PAGE.format(escape(title), escape(title), svg(played, title))


def _rows(run: Played, top: float, scale: float) -> Iterator[str]:
    schedule = run.schedule
    index_on_rank = {stage: n for rank in range(schedule.ranks) for n, stage in enumerate(schedule.stages_of(rank))}
    for rank in range(schedule.ranks):
        y = top + rank * (ROW + GAP)
        yield (
            f'<text x="4" y="{y + 16}">rank {rank}</text>'
            f'<rect class="idle" x="{LEFT}" y="{y}" width="{run.seconds * scale:.2f}" height="{ROW}"/>'
        )
    for rank, action, start, end in run:
        x, y, wide = LEFT + (start - run.first) * scale, top + rank * (ROW + GAP), (end - start) * scale
        odd = " odd" if index_on_rank[action.stage] % 2 else ""
        yield (
            f'<rect class="{action.kind}{odd}" x="{x:.2f}" y="{y}" width="{max(wide - 1, 0.5):.2f}" height="{ROW}" '
            f'rx="2">'
            f"<title>{action}: {KINDS[action.kind]}, stage {action.stage}, micro-batch {action.micro_batch}, "
            f"{start - run.first:.6g} to {end - run.first:.6g} s</title></rect>"
        )
        if wide >= 7 * len(str(action.micro_batch)) + 2:
            yield f'<text class="number" x="{x + wide / 2 - 0.5:.2f}" y="{y + 16}">{action.micro_batch}</text>'
