"""The last resort before a plan is refused: other strategies where memory peaks.

Prices of memory know what stays and what waits for the backward, not what passes by between two ops or inside of a
collective. Where that is what does not fit, one class after the other near the peak takes the strategy with which the
step as it is played through (autopar/planner/objective/memory_timeline.py) holds least.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..objective.checkpoint_min_cut import FULL
from ..objective.evaluate import Evaluation
from ..objective.memory_timeline import live_bytes
from ..problem.vertices import STATE

if TYPE_CHECKING:
    from .search import Run

MOST_TRIED, FEWEST_TRIED = 20_000, 60  # plans, of which a graph with many ops is tried fewer
FAR = 2.0  # times the limit, from where no few changes help
WIDEST = 3  # uses between the peak and what may change


def squeezed(run: Run, start: Evaluation) -> Evaluation:
    """Return the fastest plan found that fits, or else the one that is nearest to it, by changes of one class at a time,
    or of two that share a tensor, to `start`, which recomputes all and does not fit, and to what was found before."""
    if start.bytes_ > FAR * run.limit_bytes:
        return start
    search = _Descent(run, start)
    for choice in [run.by_class(start), *reversed(run.found)]:
        search.descend(run.by_strategy(choice))
    return search.best


class _Descent:
    """Plans that are nearer and nearer to one that fits, then faster and faster."""

    def __init__(self, run: Run, start: Evaluation):
        self.run, self.best, self.rank = run, start, (_excess(run, start), start.seconds)
        self.left = max(FEWEST_TRIED, MOST_TRIED // len(run.problem.vertices))
        self.seen: set[tuple[int, ...]] = set()

    def descend(self, choice: dict[int, int]) -> None:
        """Go down from a choice by class, as long as there is something left to try."""
        found = self._tried(choice)
        if found is None:
            return
        (here, rank), pairs = found, False
        while self.left > 0:
            before = rank
            for change in self._changes(here, choice, pairs):
                if self.left <= 0:
                    break
                found = self._tried(choice | change)
                if found is not None and found[1] < rank:
                    (here, rank), choice = found, choice | change
            if rank == before and pairs:
                break
            pairs = rank == before

    def _tried(self, choice: dict[int, int]) -> tuple[Evaluation, tuple[float, float]] | None:
        key = tuple(choice.values())
        if key in self.seen:
            return None
        self.seen.add(key)
        self.left -= 1
        found = _settled(self.run, choice)
        if found is not None and found[1] < self.rank:
            self.best, self.rank = found
        return found

    def _changes(self, e: Evaluation, choice: dict[int, int], pairs: bool) -> Iterator[dict[int, int]]:
        """Iterate over changes of one class near the peak, or, if `pairs`, of two that share a tensor."""
        near, run = _near_the_peak(self.run, e), self.run
        options = {cls: [k for k in np.flatnonzero(run.allowed[cls]).tolist() if k != choice[cls]] for cls in near}
        if not pairs:
            yield from ({cls: k} for cls in near for k in options[cls])
            return
        edges = {(run.problem.vertices[u.producer].cls, run.problem.vertices[u.consumer].cls) for u in run.problem.uses}
        for one, other in sorted(edges):
            if one in options and other in options and one != other:
                yield from ({one: k, other: m} for k in options[one] for m in options[other])


def _settled(run: Run, choice: dict[int, int]) -> tuple[Evaluation, tuple[float, float]] | None:
    """Return the plan of a choice by class with as much computed again as makes it fit, or with all, and how it ranks;
    None if it is impossible."""
    e = run.evaluate(run.prices, {v.index: choice[v.cls] for v in run.problem.vertices})
    if not np.isfinite(e.seconds):
        return None
    fitted = run.solver.made_to_fit(run.solver.with_peak(e))
    if fitted is not None:
        return fitted, (0.0, fitted.seconds)
    full = run.solver.with_peak(run.solver.blocks.at_level(e, FULL))
    return full, (_excess(run, full), full.seconds)


def _excess(run: Run, e: Evaluation) -> float:
    """Return by how much the bytes are above the limit, added up over the runs of a step: less of that is nearer to a
    plan that fits, where the peak alone may not tell one from another."""
    above = live_bytes(run.problem, e, run.solver.pricer).total - run.limit_bytes
    return float(above.clip(0.0).sum())


def _near_the_peak(run: Run, e: Evaluation) -> list[int]:
    """Return the classes of what runs at the peak, and of what makes and reads its tensors, the nearest first."""
    live, problem = live_bytes(run.problem, e, run.solver.pricer), run.problem
    if not live.order.runs:
        return []
    near = {live.order.runs[live.peak_at].vertex: None}
    for _ in range(WIDEST):
        for use in problem.uses:
            if use.slot != STATE and (use.producer in near or use.consumer in near):
                near |= {use.producer: None, use.consumer: None}
    return list(dict.fromkeys(problem.vertices[v].cls for v in near))
