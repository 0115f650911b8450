"""Plans of a micro-batch between two that were found at prices of memory.

Plans at prices that are far apart are corners of the lower convex hull of seconds and bytes, but not neighbours. A
corner between two of them is what costs least at the price at which both cost the same (Cohon, Multiobjective
Programming and Planning, 1978, section 6.3), if that is less than they cost. It is searched for exactly: the two are
its rivals, and they are near.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..objective.evaluate import Evaluation
from ..problem.multipliers import Prices

if TYPE_CHECKING:
    from .search import Estimate, PipelineSearch

MOST_CORNERS = 3
WORTH = 5e-3  # of a step, that a plan between two others may save at most
SAME = 1e-4  # of the cost of a plan, by which another one that is of any use costs less


def corners_between(search: PipelineSearch, found: Sequence[Estimate]) -> list[Estimate]:
    """Estimate plans between the fastest pipeline found that fits and computes nothing again, and the one that would be
    fastest if the memory had no limit; for that one's schedule."""
    as_it_is = [one for one in found if one.fits and one.step_seconds <= one.least_seconds]
    lean = min(as_it_is, key=lambda one: one.step_seconds, default=None)
    others = [one for one in found if lean is not None and _is_faster(one, lean)]
    fast = min(others, key=lambda one: one.least_seconds, default=None)
    new: list[Estimate] = []
    while len(new) < MOST_CORNERS and lean and fast and fast.least_seconds < lean.step_seconds * (1 - WORTH):
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
        if not (estimate.fits and estimate.step_seconds <= estimate.least_seconds):
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
