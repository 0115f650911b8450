"""Plans that keep values on the host for the backward, made of plans that do not fit, or that compute much again.

Every plan that a search has tried is made to fit once more: by less recomputation than it takes alone, with the rest of
the missing bytes on the host. What the link carries beside the compute of both phases costs nothing, so that about so
many bytes are best; more and less are tried. The search itself goes as without a host: no plan is slower for it.

Its bound does not hold for such plans. With D(L) the least of (seconds + L * bytes) over all plans of the device, and h
bytes on the host, which take the link h / speed both in the forward and in the backward,

    T + L * (limit + h) >= D(L),   h <= speed * T / 2,   so   T >= (D(L) - L * limit) / (1 + L * speed / 2).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..objective.evaluate import Evaluation, evaluate
from ..objective.host_values import may_wait_on_host, saved_on_host, taken
from ..problem.multipliers import PHASES, Prices
from ..problem.offload import on_device, room_on_host

if TYPE_CHECKING:
    from .search import Outcome
    from .solver import Solver

SHARES = (0.25, 0.5, 0.7, 0.85, 1.0, 2.0)  # of the bytes that can be hidden, which are tried
MOST_TRIES = 4  # to make one plan fit: what passes by is known afterwards only
MOST_TURNS = 6  # to find how many bytes have to be on the host
MOST_PLANS = 4  # that are made to fit, of those that a search has tried
MARGIN = 1.02  # of the bytes that are still missing
ENOUGH = 5e-3  # of the limit, which may be left over


def bound_with_host(solver: Solver, bound_seconds: float, prices: Prices) -> float:
    """Return the bound of plans with values on the host, given that of plans without at some prices."""
    speed = solver.host_bytes_per_second
    return bound_seconds / (1.0 + prices.byte_seconds * speed / 2) if bound_seconds > 0 else bound_seconds


def fastest_with_host(
    solver: Solver, candidates: Iterable[tuple[Evaluation, Prices]], best: Evaluation | None
) -> list[Evaluation]:
    """Return plans with values on the host that fit and whose streams need less than `best`'s, made of the fastest of
    some plans, several of each: how far their copies are hidden is known when they are played."""
    found: list[Evaluation] = []
    if not solver.host_bytes_per_second:
        return found
    for e, prices in sorted(_distinct(candidates), key=lambda pair: pair[0].seconds)[:MOST_PLANS]:
        if best is not None and e.seconds >= best.seconds:
            break
        fitted = _mixtures(solver, e, prices)
        found += [one for one in fitted if best is None or one.seconds < best.seconds]
        best = min([*found, *([best] if best else [])], key=lambda one: one.seconds, default=None)
    return found


def smallest_with_host(solver: Solver, candidates: Iterable[tuple[Evaluation, Prices]]) -> list[Evaluation]:
    """Return plans with values on the host that fit, made of the smallest of some plans."""
    if not solver.host_bytes_per_second:
        return []
    plans = sorted(_distinct(candidates), key=lambda pair: solver.blocks.least_bytes(pair[0]))
    return [one for e, prices in plans[:MOST_PLANS] for one in _mixtures(solver, e, prices)]


def may_leave_parameters(solver: Solver, found: Outcome) -> bool:
    """Return whether a plan seems to fit with all of its parameters on the device instead, in the same layouts, with as
    much computed again, or as many values on the host, as it takes."""
    e, problem = found.evaluation, solver.problem
    choice = {v.index: on_device(problem.choices(v.index), e.choice[v.index]) for v in problem.vertices}
    if choice == e.choice:
        return True
    keep = found.restriction.keep
    plain = solver.with_peak(evaluate(problem, choice, solver.pricer, solver.free, keep, e.first))
    return solver.made_to_fit(plain) is not None or bool(smallest_with_host(solver, [(plain, solver.free)]))


def _distinct(candidates: Iterable[tuple[Evaluation, Prices]]) -> list[tuple[Evaluation, Prices]]:
    known: dict[tuple, tuple[Evaluation, Prices]] = {}
    for e, prices in candidates:
        known.setdefault((tuple(sorted(e.choice.items())), e.first, len(e.saved)), (e, prices))
    return list(known.values())


def _mixtures(solver: Solver, e: Evaluation, prices: Prices) -> list[Evaluation]:
    """Return a plan as it fits with several amounts of bytes on the host and as much recomputation as is missing
    then."""
    missing = e.bytes_ - solver.limit_bytes
    if missing <= 0:
        return []
    hidden = solver.host_bytes_per_second * min(e.loads[phase].every.seconds(e.overlap) for phase in PHASES)
    least = solver.blocks.least_bytes(e) - solver.limit_bytes  # that no recomputation frees
    most = min(missing, room_on_host(solver.problem, e))
    amounts = {min(most, max(MARGIN * least, share * min(missing, hidden))) for share in (*SHARES, 0.0)}
    fitted = (_fitted(solver, e, prices, bytes_) for bytes_ in sorted(amounts) if bytes_ > 0)
    return [one for one in fitted if one is not None]


def _fitted(solver: Solver, e: Evaluation, prices: Prices, bytes_: float) -> Evaluation | None:
    """Return a plan with about so many bytes on the host, and what else is missing computed again."""
    limit = solver.limit_bytes + bytes_
    for _ in range(MOST_TRIES):
        fitted, _ = solver.blocks.fit(e, limit, prices)
        if fitted is None:
            return None
        found, excess = _as_few_as_fit(solver, fitted, bytes_)
        if found is not None:
            return found
        limit -= excess
    return None


def _as_few_as_fit(solver: Solver, e: Evaluation, bytes_: float) -> tuple[Evaluation | None, float]:
    """Return a plan with as many values on the host as it takes to fit, about so many bytes, or None if all that may
    are too few; and the bytes that it is then too large."""
    able, room = may_wait_on_host(solver.blocks, e, solver.host_bytes_per_second), room_on_host(solver.problem, e)
    most, low, best, excess = sum(value.bytes_ * value.count for value in able), 0.0, None, 0.0
    for turn in range(MOST_TURNS):
        found = solver.with_peak(saved_on_host(e, taken(able, bytes_, room)))
        excess = found.bytes_ - solver.limit_bytes
        if excess <= 0:
            best = found if best is None or found.host_bytes < best.host_bytes else best
        else:
            low = max(low, found.host_bytes)
        if -ENOUGH * solver.limit_bytes <= excess <= 0 or best is None and found.host_bytes >= most:
            break
        bytes_ += excess * (MARGIN * 2**turn if excess > 0 else 1.0)
        if best is not None:  # between what is too little and what is enough
            bytes_ = min(max(bytes_, (3 * low + best.host_bytes) / 4), best.host_bytes)
    return best, excess
