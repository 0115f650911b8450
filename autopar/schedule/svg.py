"""A schedule as an SVG picture: a row a rank, a box an action with its micro-batch's number, times to scale."""

from __future__ import annotations

from html import escape

from .actions import KINDS
from .played import Played

ROW, GAP, LEFT, TOP, BOX = 24, 4, 62, 34, 22  # pixels; BOX: the shortest action, if the whole then fits into WIDEST
WIDEST = 4000
STYLE = """
.pipeline { font: 12px system-ui, "DejaVu Sans", sans-serif; --text: #1c2330; --idle: #eef0f4;
  --F: #5b8def; --B: #8a7ae0; --I: #2fa58b; --W: #e0a63c; }
.pipeline text { fill: var(--text); }
.pipeline .number { fill: #10141b; text-anchor: middle; pointer-events: none; }
.pipeline .idle { fill: var(--idle); }
.pipeline .F { fill: var(--F); } .pipeline .B { fill: var(--B); } .pipeline .I { fill: var(--I); } .pipeline .W { fill: var(--W); }
.pipeline .odd { fill-opacity: 0.6; }
@media (prefers-color-scheme: dark) { .pipeline { --text: #e6e9ef; --idle: #232933; }
  .pipeline .odd { fill-opacity: 1; filter: brightness(1.18); } }
"""


def svg(played: Played, title: str | None = None) -> str:
    """The picture, with no file or font it depends on. The second, fourth, ... stage of a rank has a lighter colour."""
    schedule, first = played.schedule, played.first
    actions = list(played)
    shortest = min((end - start for *_, start, end in actions if end > start), default=1.0)
    scale = min(BOX / shortest, WIDEST / (played.seconds or 1.0))
    width, height = LEFT + played.seconds * scale + 8, TOP + schedule.ranks * (ROW + GAP) + 4
    place = {stage: n for rank in range(schedule.ranks) for n, stage in enumerate(schedule.stages_of(rank))}
    title = schedule.name if title is None else title
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" class="pipeline" width="{width:.0f}" height="{height}" '
             f'viewBox="0 0 {width:.0f} {height}" role="img"><title>{escape(title)}</title><style>{STYLE}</style>']  # fmt: skip
    used = [kind for kind in KINDS if any(action.kind == kind for _, action, *_ in actions)]
    parts += [f'<rect class="{kind}" x="{LEFT + 120 * n}" y="8" width="12" height="12" rx="2"/>'
              f'<text x="{LEFT + 120 * n + 17}" y="18">{KINDS[kind]}</text>' for n, kind in enumerate(used)]  # fmt: skip
    for rank in range(schedule.ranks):
        y = TOP + rank * (ROW + GAP)
        parts.append(f'<text x="4" y="{y + 16}">rank {rank}</text>'
                     f'<rect class="idle" x="{LEFT}" y="{y}" width="{played.seconds * scale:.2f}" height="{ROW}"/>')  # fmt: skip
    for rank, action, start, end in actions:
        x, y, wide = LEFT + (start - first) * scale, TOP + rank * (ROW + GAP), (end - start) * scale
        odd = " odd" if place[action.stage] % 2 else ""
        parts.append(f'<rect class="{action.kind}{odd}" x="{x:.2f}" y="{y}" width="{max(wide - 1, 0.5):.2f}" height="{ROW}" rx="2">'
                     f"<title>{action}: {KINDS[action.kind]}, stage {action.stage}, micro-batch {action.micro_batch}, "
                     f"{start - first:.6g} to {end - first:.6g} s</title></rect>")  # fmt: skip
        if wide >= 7 * len(str(action.micro_batch)) + 2:
            parts.append(f'<text class="number" x="{x + wide / 2 - 0.5:.2f}" y="{y + 16}">{action.micro_batch}</text>')
    return "\n".join([*parts, "</svg>"])
