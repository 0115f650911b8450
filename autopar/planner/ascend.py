"""From bounds to a plan: ascend the dual, round, improve, and let the integer program decide what is left.

One call minimizes the priced cost over the allowed strategies. The ascent alone usually closes the gap; where it
stalls, strategies whose reduced cost exceeds the gap are removed and HiGHS solves the rest exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .dual import Dual
from .program import Program, Solution
from .tied import Tied


@dataclass(frozen=True)
class Search:
    """How far to go: relative gap that is good enough, sweeps, and the time the integer program may take."""

    gap: float = 1e-3
    rounds: int = 120
    program_seconds: float = 20.0
    largest_program: int = 80_000  # variables


def minimize(dual: Dual, starts: Sequence[dict[int, int]] = (), search: Search = Search()) -> Solution:
    """The best choice by class that was found at the dual's prices, its priced cost and a proven lower bound on it. `starts` are
    choices to do at least as well as; those that are not allowed are left out."""
    tied = Tied(dual)
    best = None
    for start in starts:
        if all(dual.allowed[cls][k] for cls, k in start.items()):
            value = tied.objective(start)
            if best is None or value < best.objective:
                best = Solution(start, value, -np.inf)
    bound = last = -np.inf
    for turn in range(search.rounds):
        dual.sweep(True)
        dual.sweep(False)
        if turn % 4 != 3:
            continue
        bound = max(bound, dual.bound())
        if best is None or best.objective - bound > search.gap * abs(best.objective):
            rounded = tied.improve(dual.round())
            value = tied.objective(rounded)
            if best is None or value < best.objective:
                best = Solution(rounded, value, bound)
        if best.objective - bound <= search.gap * abs(best.objective):
            return Solution(best.choice, best.objective, min(bound, best.objective))
        if turn > 8 and bound - last < max(0.2 * search.gap * abs(bound), 0.1 * (best.objective - bound)):
            break  # the ascent would take many more sweeps, the program that is left perhaps few seconds
        last = bound
    return _finish(dual, tied, Solution(best.choice, best.objective, bound), search)


def _finish(dual: Dual, tied: Tied, best: Solution, search: Search) -> Solution:
    """Exact solution over the strategies that can still improve on `best`; the program knows no recomputation."""
    if dual.recomputable:
        return best
    base, reduced = dual.reduced_costs()
    slack = (best.objective - base) * (1 + 1e-9)
    remaining = {}
    for i, cls in enumerate(dual.classes):
        mask = np.zeros(len(dual.problem.classes[cls].strategies), bool)
        mask[dual.index[i][reduced[i] <= slack]] = True
        mask[best.choice[cls]] = True
        remaining[cls] = mask
    program = Program(dual.problem, dual.hubs, remaining, dual.prices, dual.keep_parameters)
    if program.variables > search.largest_program:
        return best
    solved = program.solve(search.program_seconds, search.gap / 2)
    if solved is None:
        return best
    # a plan outside the remaining strategies costs more than `best`, one inside at least the program's bound
    bound = max(best.bound, min(solved.bound, best.objective))
    value = tied.objective(solved.choice)
    winner = solved.choice if value < best.objective else best.choice
    return Solution(winner, min(value, best.objective), min(bound, value, best.objective))
