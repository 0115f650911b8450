"""Go from bounds to a plan: ascend the dual, round, improve, and let the integer program decide what is left.

One call minimizes the priced cost over the allowed strategies. The ascent alone usually closes the gap; where it
stalls, strategies whose reduced cost exceeds the gap are removed and HiGHS solves the rest exactly, or, if too many are
left, first among the most promising ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .dual import Dual
from .ilp import Program, Solution, flows_of
from .local_search import LocalSearch
from .owners import with_owners

DUAL, ILP = "dual", "ilp"
TURNS_TO_EXCLUDE = 16
HOPE = 8  # how many times as much as by the last sweeps the bound may still rise, for its floor to be in reach
MOST_KEPT = 0.6  # of the options, for a smaller dual to be worth making


@dataclass(frozen=True)
class Search:
    """The effort of a search: relative gap that is good enough, sweeps, and variables of the integer programs that are
    solved at the end. A plan that takes `cutoff_seconds` or more is of no use: a search may give up with BeyondCutoff
    once no other can be found."""

    gap: float = 2e-3
    rounds: int = 120
    patience: float = 0.05  # give up if four sweeps close less than this of what is open
    largest_program: int = 8_000  # of all strategies that can still be better
    largest_choice: int = 8_000  # of the most promising ones
    last_word: bool = True  # an integer program decides what is left at the end, and the plan says so
    asks_later: bool = False  # a plan under a limit waits for that until it is `asked` for
    squeezes: bool = True  # plans near a limit are changed op by op before none of a large graph is said to fit
    cutoff_seconds: float = math.inf
    program_seconds: float = 60.0  # never reached by programs of these sizes, so that plans do not depend on the clock
    floor_objective: float = -math.inf  # priced: below it nothing new is proved, so that there is no need to go on
    solver: str = DUAL  # or ILP: the full program instead (autopar/planner/solver/full_program.py)


class BeyondCutoff(Exception):
    """No plan takes less than the cutoff; `bound_seconds` at least. `candidates`: if meshes were searched, what is
    reported of them."""

    candidates: tuple = ()

    def __init__(self, bound_seconds: float):
        super().__init__(f"no plan takes less than {bound_seconds:.6g} s")
        self.bound_seconds = bound_seconds


def minimize(dual: Dual, starts: Sequence[dict[int, int]] = (), search: Search = Search()) -> Solution:
    """Return the best choice by class that was found at the dual's prices, its priced cost and a proven lower bound on
    it. `starts` are choices to do at least as well as; those that are not allowed are left out."""
    tied = LocalSearch(dual)
    pool = [s for s in starts if all(dual.allowed[cls][k] for cls, k in dual.strategies(s).items())]
    best = min((Solution(s, tied.objective(s), -np.inf) for s in pool), key=lambda s: s.objective, default=None)
    if best is not None and dual.reruns:  # found at other prices of what runs again
        pool.append(tied.improve(best.choice))
        best = Solution(pool[-1], tied.objective(pool[-1]), -np.inf)
    bound = last = -np.inf
    is_over = False
    for turn in range(search.rounds):
        if best is not None and best.objective <= search.floor_objective:
            is_over = True
            break
        dual.sweep(True)
        dual.sweep(False)
        if turn % 4 != 3:
            continue
        bound = max(bound, dual.bound())
        if best is None or not _is_near(best, bound, search.gap):
            rounded = dual.round()
            pool += [rounded, tied.improve(rounded)]
            value = tied.objective(pool[-1])
            if best is None or value < best.objective:
                best = Solution(pool[-1], value, bound)
            if turn == 3:
                for other in with_owners(dual, tied, pool[-1]):
                    pool.append(other)
                    if (value := tied.objective(other)) < best.objective:
                        best = Solution(other, value, bound)
        if is_over := _is_near(best, bound, search.gap):
            break
        if turn > 8 and bound - last < max(0.2 * search.gap * abs(bound), search.patience * (best.objective - bound)):
            break  # the ascent would take many more sweeps, the program that is left perhaps few seconds
        if turn > 16 and bound + HOPE * (bound - last) < search.floor_objective:
            is_over = True
            break
        last = bound
        if turn % TURNS_TO_EXCLUDE == TURNS_TO_EXCLUDE - 1:
            dual = _without_worse(dual, best.objective)
    assert best is not None
    best = Solution(best.choice, best.objective, min(bound, best.objective))
    if not is_over:
        best = _finish(dual, tied, best, pool, search)
    return best


def _without_worse(dual: Dual, objective: float) -> Dual:
    """Return the dual without the options that no choice has which costs less than `objective`, if those are many."""
    base, reduced = dual.reduced_costs()
    keep = [r <= (objective - base) * (1 + 1e-9) for r in reduced]
    keep = [mask if mask.any() else r == r.min() for mask, r in zip(keep, reduced)]
    is_worth = sum(int(mask.sum()) for mask in keep) < MOST_KEPT * sum(len(mask) for mask in keep)
    return dual.restricted(keep) if is_worth else dual


def _is_near(best: Solution, bound: float, gap: float) -> bool:
    """Return whether the objective is finite and within the relative `gap` of the bound; a choice with an impossible
    move has an infinite one."""
    return best.objective < math.inf and best.objective - bound <= gap * abs(best.objective)


def _finish(dual: Dual, tied: LocalSearch, best: Solution, pool: Sequence[dict[int, int]], search: Search) -> Solution:
    """Return the best of what is promising, by an integer program, and of all that can still be better, if those are
    few. The program knows no recomputation."""
    if dual.reruns or not search.largest_program:
        return best
    base, reduced = dual.reduced_costs()
    slack = (best.objective - base) * (1 + 1e-9)
    left = _program(dual, best, [np.flatnonzero(r <= slack) for r in reduced], search.largest_program)
    if left.variables > search.largest_program:
        best = _promising(dual, tied, best, pool, reduced, search)
        if _is_near(best, best.bound, search.gap):
            return best
        slack = (best.objective - base) * (1 + 1e-9)
        left = _program(dual, best, [np.flatnonzero(r <= slack) for r in reduced], search.largest_program)
    if left.variables > search.largest_program:
        return best
    solved = left.solve(search.program_seconds, search.gap / 2)
    if solved is None:
        return best
    # a plan outside the remaining strategies costs more than `best`, one inside at least the program's bound
    bound = max(best.bound, min(solved.bound, best.objective))
    value = tied.objective(solved.choice)
    winner = solved.choice if value < best.objective else best.choice
    return Solution(winner, min(value, best.objective), min(bound, value, best.objective))


def _promising(
    dual: Dual, tied: LocalSearch, best: Solution, pool, reduced: list[np.ndarray], search: Search
) -> Solution:
    """Return the best choice among strategies of the pool and those of least reduced cost, as many as a program can
    take."""
    found = [sorted({choice[cls] for choice in pool}) for cls in dual.classes]
    met = [np.flatnonzero(np.isin(index, ks)) for index, ks in zip(dual.index, found)]
    for count in (8, 4, 2, 1, 0):
        keep = [np.union1d(np.argsort(r, kind="stable")[:count], m) for r, m in zip(reduced, met)]
        options = {cls: index[k] for cls, index, k in zip(dual.classes, dual.index, keep)}
        if count and flows_of(dual.hyperedges, options) > 2 * search.largest_choice:
            continue
        program = _program(dual, best, keep, 2 * search.largest_choice)
        if program.variables <= search.largest_choice or not count:
            break
    solved = (
        program.solve(search.program_seconds, search.gap / 2)
        if program.variables <= 2 * search.largest_choice
        else None
    )
    if solved is None:
        return best
    choice = tied.improve(solved.choice)
    value = tied.objective(choice)
    return Solution(choice, value, best.bound) if value < best.objective else best


def _program(dual: Dual, best: Solution, keep: list[np.ndarray], most_variables: int) -> Program:
    """Return the integer program over these of the allowed strategies, and those of `best`; an incomplete one if it has
    more variables."""
    remaining = {}
    for cls, index, chosen in zip(dual.classes, dual.index, keep):
        mask = np.zeros(len(dual.problem.classes[cls].strategies), bool)
        mask[index[chosen]] = True
        mask[best.choice[cls]] = True
        remaining[cls] = mask
    return Program(
        dual.problem, dual.hyperedges, remaining, [dual.prices], dual.keep_parameters, most_variables=most_variables
    )
