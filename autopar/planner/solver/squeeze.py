"""Other strategies where memory peaks: the last resort before a plan is refused, and what makes small plans faster.

Prices of memory know what stays and what waits for the backward, not what passes by between two ops or inside of a
collective. Where that is what does not fit, classes near the peak take other strategies, one after the other, as long
as the bytes of a step (autopar/planner/objective/memory_timeline.py) come nearer to the limit, then as long as its
seconds become fewer. Where such descents end in plans that are too large, the search goes on from the best plans met on
the way (best first), until one fits: it refuses a small graph only after all plans that single changes reach.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..objective.checkpoint_min_cut import FULL
from ..objective.evaluate import Evaluation
from ..objective.memory_timeline import live_bytes
from ..problem.problem import Problem
from ..problem.vertices import STATE

if TYPE_CHECKING:
    from .search import RestrictedSearch

MOST_TRIED, FEWEST_TRIED = 20_000, 60  # plans, of which a graph with many ops is tried fewer
ENOUGH_TRIED = 1000  # for it to be likely that a plan which fits already becomes faster
FAR = 4.0  # times the limit, from where no few changes help
WIDEST = 3  # uses between the peak and what may change


def squeezed(run: RestrictedSearch, start: Evaluation) -> Evaluation:
    """Return the fastest plan found that fits, or else the one that is nearest to it, by changes of one class after the
    other, alone or with its neighbours, to `start`, and to what was found before. Where the graph is so large that few
    plans can be tried, a start that fits stays as it is."""
    search, goes_on = _Descent(run, start), is_small(run.problem)
    if start.bytes_ > FAR * run.limit_bytes or start.bytes_ <= run.limit_bytes and not goes_on:
        return start
    for choice in [run.by_class(start), *reversed(run.found)]:
        search.descend(run.by_strategy(choice))
    search.explore(goes_on)
    return search.best


def is_small(problem: Problem) -> bool:
    """Return whether many plans of a graph can be tried."""
    return _most_tried(problem) >= ENOUGH_TRIED


def _most_tried(problem: Problem) -> int:
    return max(FEWEST_TRIED, MOST_TRIED // len(problem.vertices))


class _Descent:
    """Plans that are nearer and nearer to one that fits, then faster and faster."""

    def __init__(self, run: RestrictedSearch, start: Evaluation):
        self.run, self.best, self.rank = run, start, (_excess(run, start), start.seconds)
        self.left = _most_tried(run.problem)
        self.seen: set[tuple[int, ...]] = set()
        self.settled: list[tuple[tuple[float, float], int, dict[int, int], Evaluation]] = []  # a heap of what was tried
        cls = [v.cls for v in run.problem.vertices]
        self.edges = sorted({(cls[u.producer], u.output, cls[u.consumer], u.slot) for u in run.problem.uses}, key=str)

    def descend(self, choice: dict[int, int]) -> None:
        """Go down from a choice by class, as long as there is something left to try."""
        found = self._tried(choice)
        if found is None:
            return
        (here, rank), kind = found, 0
        kinds = (self._alone, self._spread, self._pairs)
        while self.left > 0 and kind < len(kinds):
            before = rank
            for change in kinds[kind](_near_the_peak(self.run, here), choice):
                if self.left <= 0:
                    break
                found = self._tried(choice | change)
                if found is not None and found[1] < rank:
                    (here, rank), choice = found, choice | change
            kind = kind + 1 if rank == before else 0

    def _tried(self, choice: dict[int, int]) -> tuple[Evaluation, tuple[float, float]] | None:
        key = tuple(choice.values())
        if key in self.seen:
            return None
        self.seen.add(key)
        self.left -= 1
        found = _settled(self.run, choice)
        if found is not None:
            heapq.heappush(self.settled, (found[1], len(self.seen), choice, found[0]))
            if found[1] < self.rank:
                self.best, self.rank = found
        return found

    def explore(self, goes_on: bool) -> None:
        """Change one class, alone or with its neighbours, of the best plan of those whose changes were not all tried,
        and so on, until one fits, with `goes_on` until no tries are left: a way to it may lead over plans that hold
        more or are slower, where a descent stops."""
        while self.settled and self._is_open(goes_on):
            _, _, choice, here = heapq.heappop(self.settled)
            near = _near_the_peak(self.run, here)
            for change in itertools.chain(self._alone(near, choice), self._spread(near, choice)):
                if not self._is_open(goes_on):
                    break
                self._tried(choice | change)

    def _is_open(self, goes_on: bool) -> bool:
        return self.left > 0 and (goes_on or self.best.bytes_ > self.run.limit_bytes)

    def _others(self, cls: int, choice: dict[int, int]) -> list[int]:
        return [k for k in np.flatnonzero(self.run.allowed[cls]).tolist() if k != choice[cls]]

    def _alone(self, near: list[int], choice: dict[int, int]) -> Iterator[dict[int, int]]:
        """Iterate over changes of one class."""
        yield from ({cls: k} for cls in near for k in self._others(cls, choice))

    def _pairs(self, near: list[int], choice: dict[int, int]) -> Iterator[dict[int, int]]:
        """Iterate over changes of two classes that share a tensor."""
        for one, other in sorted({(producer, consumer) for producer, _, consumer, _ in self.edges}):
            if one in near and other in near and one != other:
                others = self._others(other, choice)
                yield from ({one: k, other: m} for k in self._others(one, choice) for m in others)

    def _spread(self, near: list[int], choice: dict[int, int]) -> Iterator[dict[int, int]]:
        """Iterate over changes of one class that go on to its neighbours, to the cheapest of their strategies that read
        or make a tensor in the layout which it now has, as far as there are some."""
        for cls in near:
            for k in self._others(cls, choice):
                changed, waiting = {cls: k}, [cls]
                while waiting:
                    here = waiting.pop()
                    for other, fitting in self._fitting(here, changed[here]):
                        if other not in changed and choice[other] not in fitting and fitting:
                            seconds = self.run.problem.classes[other].seconds
                            changed[other] = min(fitting, key=lambda m: (seconds[m], m))
                            waiting.append(other)
                yield changed

    def _fitting(self, cls: int, k: int) -> Iterator[tuple[int, list[int]]]:
        """Iterate over the neighbours of a class with their strategies that agree with its strategy k."""
        classes = self.run.problem.classes
        for producer, output, consumer, slot in self.edges:
            if cls not in (producer, consumer) or producer == consumer:
                continue
            made, wanted = classes[producer].output_layouts(output), classes[consumer].layouts(slot)
            other, mine, theirs = (consumer, made, wanted) if cls == producer else (producer, wanted, made)
            yield other, [m for m in np.flatnonzero(self.run.allowed[other]).tolist() if theirs[m] == mine[k]]


def _settled(run: RestrictedSearch, choice: dict[int, int]) -> tuple[Evaluation, tuple[float, float]] | None:
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


def _excess(run: RestrictedSearch, e: Evaluation) -> float:
    """Return by how much the bytes are above the limit, added up over the runs of a step: less of that is nearer to a
    plan that fits, where the peak alone may not tell one from another."""
    above = live_bytes(run.problem, e, run.solver.pricer).total - run.limit_bytes
    return float(above.clip(0.0).sum())


def _near_the_peak(run: RestrictedSearch, e: Evaluation) -> list[int]:
    """Return the classes of what runs at the peak, of what makes and reads its tensors, and then all others, which may
    hold something all the time."""
    live, problem = live_bytes(run.problem, e, run.solver.pricer), run.problem
    if not live.order.runs:
        return list(problem.classes)
    near = {live.order.runs[live.peak_at].vertex: None}
    for _ in range(WIDEST):
        for use in problem.uses:
            if use.slot != STATE and (use.producer in near or use.consumer in near):
                near |= {use.producer: None, use.consumer: None}
    return list(dict.fromkeys([*(problem.vertices[v].cls for v in near), *problem.classes]))
