"""A pass: one step of the compiler, as a value. The list of them all is in autopar/compiler.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

GRAPH, CAPTURE = "graph", "capture"


def nothing(context: object) -> tuple[()]:
    """Return no options."""
    return ()


def always(context: object) -> bool:
    """Return True."""
    return True


@dataclass(frozen=True)
class Pass:
    """A step of the compiler: `run(subject, *options(context))` returns what the next one takes, or None if it changed
    the subject in place. `takes`: "graph", the fx.GraphModule, or "capture", what holds it. `context` is what the
    passes of a list know (see autopar/compiler.py); `when(context)` says whether the pass runs, `needs` what it takes
    on the command line to make it run. A pass of a user's own names the one that it runs `after`."""

    name: str
    run: Callable[..., Any]
    options: Callable[..., tuple[Any, ...]] = nothing
    when: Callable[..., bool] = always
    takes: str = GRAPH
    after: str | None = None
    needs: str = ""
