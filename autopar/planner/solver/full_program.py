"""The full integer program in one piece, for cross-checks: every strategy of every class, communication that hides, and
memory at both of its peaks, given to OR-tools.

The search looks for the prices at which the cheapest plan costs most (autopar/planner/solver/cutting_planes.py). Here
the same is said by rows: a phase takes as long as its busiest stream, and a step the most of what it costs where all
weight of a phase is on one of its streams:

    seconds of a step = cost where all streams compute + what each phase needs beyond that
    beyond, of a phase >= cost at (a stream of the phase) - cost where all streams compute      of all its streams
    bytes that stay, + those that wait for the backward <= room         where the forward ends
    bytes that stay, + gradients                        <= room         where the backward ends

With rows of memory every op may also run again, as in the search. What the program does not know are values between two
ops, and that a block computes again as a whole: what it finds is made to fit as all plans are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ...errors import StrategyError
from .ilp import Program, Solution
from .last_word import limit_peaks, one_hot

if TYPE_CHECKING:
    from .search import RestrictedSearch

GAP = 1e-4
MOST_SECONDS = 900.0


def solve(run: RestrictedSearch, is_limited: bool) -> Solution | None:
    """Return the choice of options by class that the full program of a search finds best, with its seconds and a bound
    on those of every plan, or of every plan that fits if it `is_limited`; None if none fits. Raise StrategyError if the
    time is too short."""
    solver = run.solver
    prices, spans = one_hot(replace(solver.free, byte_seconds=0.0, saved=True))
    count = len(prices)
    gradients = 1.0 if run.accumulates else 0.0  # those of earlier passes are there when the forward ends
    peaks = [replace(prices[0], byte_seconds=1.0 / solver.room_bytes, gradients=g) for g in (gradients, 1.0)]
    reruns = solver.blocks.reruns if is_limited else ()
    every = [*prices, *(peaks if is_limited else ())]
    program = Program(run.problem, run.hyperedges, run.allowed, every, run.restriction.keep, reruns)
    costs = program.costs()
    if is_limited:
        limit_peaks(program, costs[count:] - costs[0], 1.0)
    found = program.solve(MOST_SECONDS, GAP, costs=program.busiest(costs[0], costs[:count] - costs[0], spans))
    if found is None and not is_limited:
        raise StrategyError(
            f"the integer program found no plan in {MOST_SECONDS:.0f} s",
            mesh=run.problem.mesh,
            fix='use solver="dual", or a smaller model',
        )
    return found
