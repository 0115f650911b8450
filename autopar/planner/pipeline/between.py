"""Plans of a micro-batch between two that were found at prices of memory.

Plans at prices that are far apart are corners of the lower convex hull of seconds and bytes, but not neighbours. A
corner between two of them is what costs least at the price at which both cost the same (Cohon, Multiobjective
Programming and Planning, 1978, section 6.3), if that is less than they cost. It is searched for exactly: the two are
its rivals, and they are near. What no price makes the best, but fits in memory that the best pipeline leaves, the
integer program looks for around it, with that memory as its limit (autopar/planner/solver/last_word.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..objective.evaluate import Evaluation
from ..problem.multipliers import Prices

if TYPE_CHECKING:
    from .estimate import Estimate
    from .search import PipelineSearch

MOST_CORNERS, MOST_PROGRAMS = 3, 3
WORTH = 5e-3  # of a step, that a plan between two others may save at most
SAME = 1e-4  # of the cost of a plan, by which another one that is of any use costs less


def plans_between(search: PipelineSearch, found: Sequence[Estimate]) -> list[Estimate]:
    """Estimate plans between the fastest pipeline found that fits and computes nothing again, and the one that would be
    fastest if the memory had no limit; for that one's schedule."""
    as_it_is = [one for one in found if _is_as_it_is(one)]
    lean = min(as_it_is, key=lambda one: one.step_seconds, default=None)
    others = [one for one in found if lean is not None and _is_faster(one, lean)]
    fast = min(others, key=lambda one: one.least_seconds, default=None)
    if lean is None or fast is None or fast.least_seconds >= lean.step_seconds * (1 - WORTH):
        return []
    corners = _corners(search, lean, fast)
    for corner in corners:
        lean = corner if _is_as_it_is(corner) and corner.step_seconds < lean.step_seconds else lean
    return corners + _in_memory_left(search, lean, fast)


def _is_as_it_is(one: Estimate) -> bool:
    """Return whether a pipeline fits and computes nothing again."""
    return one.fits and one.step_seconds <= one.least_seconds


def _in_memory_left(search: PipelineSearch, lean: Estimate, fast: Estimate) -> list[Estimate]:
    """Estimate what the integer program makes of a pipeline that leaves memory. A micro-batch may hold as many times
    more as the fullest rank might."""
    new: list[Estimate] = []
    for _ in range(MOST_PROGRAMS):
        e, free = lean.inner.evaluation, search.plans.free_of_memory
        price, reserve = _where_equal(e, fast.inner.evaluation, free), lean.inner.problem.reserve_bytes
        room = (e.bytes_ - reserve) * (search.limit - reserve) / (lean.peak_bytes - reserve)
        inner = search.plans.in_room(lean.inner, replace(free, byte_seconds=price), room) if price > 0 else None
        if inner is None:
            break
        new.append(search.estimated(inner, lean.schedule, lean.stages_per_rank))
        if not _is_as_it_is(new[-1]) or new[-1].step_seconds >= lean.step_seconds:
            break
        lean = new[-1]
    return new


def _corners(search: PipelineSearch, lean: Estimate, fast: Estimate) -> list[Estimate]:
    """Estimate corners of the hull between two plans, the last of them next to one that fits."""
    new: list[Estimate] = []
    while len(new) < MOST_CORNERS and fast.least_seconds < lean.step_seconds * (1 - WORTH):
        one, other = lean.inner.evaluation, fast.inner.evaluation
        price = _where_equal(one, other, free := search.plans.free_of_memory)
        if price <= 0:
            break
        prices = replace(free, byte_seconds=price)
        inner = search.plans.at(prices)
        if inner.evaluation.priced(prices) >= one.priced(prices) * (1 - SAME):
            break
        estimate = search.estimated(inner, lean.schedule, lean.stages_per_rank)
        new.append(estimate)
        if not _is_as_it_is(estimate):
            fast = estimate
        elif estimate.step_seconds < lean.step_seconds:
            lean = estimate
        else:
            break
    return new


def _is_faster(one: Estimate, lean: Estimate) -> bool:
    return one.inner.evaluation.seconds < lean.inner.evaluation.seconds and one.least_seconds < lean.step_seconds


def _where_equal(one: Evaluation, other: Evaluation, free: Prices) -> float:
    """Return the price of a byte at which two plans cost the same, 0 if there is none."""
    unit = replace(free, byte_seconds=1.0)
    seconds = one.priced(free) - other.priced(free)
    bytes_ = (other.priced(unit) - other.priced(free)) - (one.priced(unit) - one.priced(free))
    return seconds / bytes_ if seconds > 0 and bytes_ > 0 else 0.0
