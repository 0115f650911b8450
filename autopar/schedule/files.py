"""Schedules as files, by the ending of the name: a picture (.svg), a page (.html), a Chrome trace (.json) or text
(.txt)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ..errors import ScheduleError
from .played import Played
from .svg import page, svg
from .text import text
from .trace import trace_of

FORMS = (".svg", ".html", ".json", ".txt")


def check_name(path: str | Path) -> None:
    """Raise ScheduleError for a name that ends in none of `FORMS`."""
    if Path(path).suffix not in FORMS:
        raise ScheduleError(f"{path} is neither a picture nor a trace", fix=f"end its name in {', '.join(FORMS)}")


def save(path: str | Path, played: Played | Mapping[str, Played], title: str | None = None) -> None:
    """Write a run, or several by their names beside each other: `{"predicted": plan.pipeline.played(), "measured":
    ...}`. Raise ScheduleError for a name that ends in none of `FORMS`."""
    check_name(path)
    some = played if isinstance(played, Played) else next(iter(played.values()))
    title = some.schedule.name if title is None else title
    made = {
        ".svg": lambda: svg(played, title), ".html": lambda: page(played, title), ".txt": lambda: text(played),
        ".json": lambda: json.dumps(trace_of(played)) + "\n",
    }  # fmt: skip
    Path(path).write_text(made[Path(path).suffix](), encoding="utf-8")
