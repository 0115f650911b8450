"""The full integer program in one piece, for cross-checks: every strategy of every class, communication that hides, and
memory at both of its peaks, given to OR-tools.

The search looks for the prices at which the cheapest plan costs most (autopar/planner/solver/cutting_planes.py). Here
the same is said by rows: a phase takes as long as its busiest stream, and a step the most of what it costs where all
weight of every phase is on one of its streams:

    seconds of a step >= cost at (stream of the forward, stream of the backward)      of all pairs
    bytes that stay, + those that wait for the backward <= room         where the forward ends
    bytes that stay, + gradients                        <= room         where the backward ends

With rows of memory every op may also run again, as in the search. What the program does not know are values between two
ops, and that a block computes again as a whole: what it finds is made to fit as all plans are.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ...errors import StrategyError
from .ilp import Program, Solution

if TYPE_CHECKING:
    from .search import Run

GAP = 1e-4
MOST_SECONDS = 900.0


def solve(run: Run, is_limited: bool) -> Solution | None:
    """Return the choice of options by class that the full program of a search finds best, with its seconds and a bound
    on those of every plan, or of every plan that fits if it `is_limited`; None if none fits. Raise StrategyError if the
    time is too short."""
    solver = run.solver
    streams = solver.pricer.prices.streams
    free = replace(solver.free, byte_seconds=0.0, saved=True)
    one_hot = [tuple(row) for row in np.vstack([np.zeros(streams - 1), np.eye(streams - 1)]).tolist()]
    corners = [replace(free, links=links) for links in itertools.product(one_hot, repeat=len(free.links))]
    gradients = 1.0 if run.accumulates else 0.0  # those of earlier passes are there when the forward ends
    peaks = [replace(corners[0], byte_seconds=1.0 / solver.room_bytes, gradients=g) for g in (gradients, 1.0)]
    reruns = solver.blocks.reruns if is_limited else ()
    program = Program(
        run.problem,
        solver.hyperedges,
        run.allowed,
        [*corners, *(peaks if is_limited else ())],
        run.restriction.keep,
        reruns,
    )
    costs = program.costs()
    if is_limited:
        early, late = costs[len(corners) :] - costs[0]
        program.limit(early, 1.0)
        program.limit(np.where(np.arange(len(late)) < program.binaries, late, 0.0), 1.0)  # nothing waits any more
    found = program.solve(MOST_SECONDS, GAP, costs=costs[: len(corners)])
    if found is None and not is_limited:
        raise StrategyError(f"the integer program found no plan in {MOST_SECONDS:.0f} s", mesh=run.problem.mesh,
                            fix='use solver="dual", or a smaller model')  # fmt: skip
    return found
