"""One search: the strategies that a restriction allows, at changing prices, until the fastest plan is found.

Communication that may hide behind compute has a weight (autopar/planner/problem/multipliers.py). Any weights give a
lower bound; the best ones are found by cutting planes (autopar/planner/solver/cutting_planes.py). The plan is then one
of those found on the way, or a mixture of two of them: one in the first blocks of a deep model, the other in the last.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ...plans.program import DecidedProgram
from ..objective.checkpoint_min_cut import FULL
from ..objective.evaluate import Evaluation, evaluate
from ..objective.player import played_seconds
from ..objective.pricer import Pricer
from ..problem.multipliers import Prices
from ..problem.recipes import Restriction
from . import full_program
from .cutting_planes import Cuts
from .dual import Dual
from .last_word import last_word
from .minimize import ILP, Search, minimize

if TYPE_CHECKING:
    from .solver import Solver

Starts = Sequence[dict[int, int]]  # choices by class
MOST_WEIGHTS = 10
DEAREST_PRICE = 1e4  # units, at which nothing but memory counts
LARGEST_PROGRAM = 2_000  # variables, at that price: relaxations say little there, so that larger programs take minutes
MOST_PLAYED = 12  # of the plans that a search has found
LIMITED_DOUBT, FAR = 0.05, 2.0  # of the bound, and times the limit, if no plan so far fits


@dataclass
class Outcome:
    """A plan's cost on the unfolded graph, with the bound that certifies it."""

    restriction: Restriction
    evaluation: Evaluation
    bound_seconds: float
    fits: bool
    pricer: Pricer
    found: Starts = ()  # choices by class that the search found on its way, the later the better
    program: DecidedProgram = DecidedProgram()  # what the integer program decided at the end
    is_limited: bool = False  # whether the fastest plan of all did not fit
    proved_at: tuple[Prices, ...] = ()  # prices that the bound is of, one for each way to reduce gradients, if known
    searched: Outcome | None = None  # the plan that the search found, before what travels was put beside products
    ask: Callable[[], Outcome] | None = None  # the integer program, if it has not had the last word yet

    @cached_property
    def seconds(self) -> float:
        """Return the seconds of an average pass as it is played."""
        return played_seconds(self.pricer.problem, self.evaluation, self.pricer)

    @property
    def hidden_seconds(self) -> float:
        """Return what the parts of the pass take more than it does, because they run beside each other."""
        return self.evaluation.apart_seconds - self.seconds

    @property
    def exposed_seconds(self) -> float:
        """Return the seconds of communication, and of copies to the host and back, that no compute hides."""
        return self.evaluation.communication_seconds + self.evaluation.host_seconds - self.hidden_seconds

    @property
    def gap(self) -> float:
        """Return the relative gap between the plan's seconds and the bound."""
        seconds = self.searched_seconds
        return max(0.0, 1.0 - self.bound_seconds / seconds) if seconds else 0.0  # a model may compute nothing

    @property
    def searched_seconds(self) -> float:
        """Return the seconds of an average pass of the plan that the search found, which the bound is of."""
        return self.seconds if self.searched is None else self.searched.seconds


def asked(outcome: Outcome) -> Outcome:
    """Return a plan after the integer program's last word, with the same bound."""
    if outcome.ask is None:
        return outcome
    return replace(outcome.ask(), bound_seconds=outcome.bound_seconds, is_limited=outcome.is_limited)


def fastest_played(outcomes: Sequence[Outcome]) -> Outcome:
    """Play the plans whose busiest streams need least, and return the one that takes least; of equal ones the first. A
    plan whose streams need more than another one takes is not played."""
    promising = sorted(outcomes, key=lambda one: one.evaluation.seconds)[:MOST_PLAYED]
    best = promising[0]
    for one in promising[1:]:
        if one.evaluation is not best.evaluation and one.evaluation.seconds < best.seconds:
            best = one if one.seconds < best.seconds else best
    return best


class RestrictedSearch:
    """One search: the allowed strategies of one restriction at changing prices. Each minimization does at least as well
    as `starts` and all choices found before."""

    def __init__(
        self,
        solver: Solver,
        restriction: Restriction,
        allowed: dict[int, np.ndarray],
        search: Search,
        starts: Starts = (),
    ):
        self.found = list(starts)
        self.solver, self.restriction, self.allowed, self.search = solver, restriction, allowed, search
        self.problem, self.limit_bytes = solver.problem, solver.limit_bytes
        self.hyperedges = [hyperedge.among(allowed) for hyperedge in solver.hyperedges]
        self.dual = Dual(solver.problem, self.hyperedges, allowed, solver.free, restriction.keep)
        self.prices = solver.free
        weights, classes = solver.weights, solver.pricer.prices.streams - 1
        self.cuts = Cuts((0.0,) * (weights + 1), (1.0,) * weights + (0.0,), classes)
        self.accumulates = solver.pricer.micro_batches > 1  # then gradients of earlier passes are there all the time

    def fastest(self, is_limited: bool = False) -> Outcome:
        """Return the fastest plan, whether it fits or not. With `is_limited` only plans that fit are of use: search
        less exactly where none do."""
        if self.search.solver == ILP:
            return self._of_program()
        best, bound, doubt, proving = None, -math.inf, 0.0, self.prices
        for _ in range(MOST_WEIGHTS):
            candidate = self.at(self.prices, replace(self.search, gap=max(self.search.gap, doubt / 4)))
            best = candidate if best is None or candidate.evaluation.seconds < best.evaluation.seconds else best
            if candidate.bound_seconds > bound:
                bound, proving = candidate.bound_seconds, self.prices
            self._cut(candidate.evaluation)
            if not self.prices.overlap or self.is_near(best.evaluation, bound):
                break
            point, doubt, _ = self.cuts.highest(bound)
            if is_limited and self._far_from_limit(doubt):
                break
            if doubt <= self.search.gap or self.cuts.is_known(point):
                break
            self.prices = self.prices.at(point)
        assert best is not None
        plans, program = [best, *(self._outcome(e, bound) for e in self.cuts.plans)], DecidedProgram()
        if self.search.last_word and self.search.largest_program and (best.fits or not is_limited):
            said = last_word(self, self.dual, proving, best.evaluation, self.by_class(best.evaluation))
            program = said.program
            if said.choice is not None:
                plans.append(self._outcome(self.settled(proving, said.choice), bound))
        best = fastest_played(plans)
        bound = min([bound, *(one.evaluation.seconds for one in plans)])
        return replace(best, bound_seconds=bound, found=tuple(self.found), program=program, proved_at=(proving,))

    def by_class(self, e: Evaluation) -> dict[int, int]:
        """Return the strategies of an evaluated plan by class, each as its first member has it."""
        return {cls: e.choice[cls] for cls in self.problem.classes}

    def by_strategy(self, choice: dict[int, int]) -> dict[int, int]:
        """Return a choice of options by class as one of strategies, in the order of the classes."""
        return {cls: choice[cls] % len(self.allowed[cls]) for cls in self.problem.classes}

    def settled(self, prices: Prices, choice: dict[int, int]) -> Evaluation:
        """Return the plan of a choice by class, with all that is alive at its peak."""
        return self.solver.with_peak(self.evaluate(prices, {v.index: choice[v.cls] for v in self.problem.vertices}))

    def _outcome(self, e: Evaluation, bound: float) -> Outcome:
        return Outcome(self.restriction, e, bound, e.bytes_ <= self.limit_bytes, self.solver.pricer)

    def _of_program(self) -> Outcome:
        """Return the plan of the full integer program."""
        found = full_program.solve(self, False)
        evaluation = self.evaluate(self.prices, {v.index: found.choice[v.cls] for v in self.problem.vertices})
        if abs(evaluation.seconds - found.objective) > 1e-4 * found.objective + 1e-9:
            raise AssertionError(f"the program's {found.objective} s are not the plan's {evaluation.seconds} s")
        e = self.solver.with_peak(evaluation)
        return replace(self._outcome(e, found.bound), found=(found.choice,))

    def _far_from_limit(self, doubt: float) -> bool:
        """Return whether fast plans are so much too large that prices of memory will change everything."""
        least = min(plan.bytes_ for plan in self.cuts.plans)
        return (
            least > self.limit_bytes
            and doubt <= LIMITED_DOUBT
            or least > FAR * self.limit_bytes
            and len(self.cuts.plans) > 1
        )

    def _cut(self, e: Evaluation) -> None:
        """Add what the plan that was found last says of the bound for all prices."""
        point = np.array([*itertools.chain(*self.prices.links), 0.0])
        held = e.resident_bytes + max(e.saved_bytes, e.gradient_bytes) + e.whole_gradient_bytes
        slope = [*e.slopes(), (held - self.solver.room_bytes) * self.solver.unit_price] if self.prices.links else [0.0]
        seconds = e.priced(replace(self.prices, byte_seconds=0.0))
        self.cuts.add(point, seconds, np.array(slope), e)

    def is_near(self, e: Evaluation, bound: float) -> bool:
        """Return whether a plan's seconds are within the search's gap of a bound."""
        return e.seconds - bound <= self.search.gap * e.seconds

    def at(self, prices: Prices, search: Search | None = None) -> Outcome:
        """Return the plan that costs least at these prices, as exactly as a search goes, by default the run's own."""
        outcome = self.at_if_new(prices, search or self.search, ())
        assert outcome is not None
        return outcome

    def at_if_new(self, prices: Prices, search: Search, known: Collection[dict[int, int]]) -> Outcome | None:
        """Return the same, None if the plan's choice by vertex is one of those `known`, so that it is not evaluated."""
        self.dual.price(prices)
        solution = minimize(self.dual, self.found, search)
        self.found.append(solution.choice)
        choice = {v.index: solution.choice[v.cls] for v in self.problem.vertices}
        if choice in known:
            return None
        evaluation = self.evaluate(prices, choice)
        self._check(solution.objective, evaluation, prices)
        evaluation = self.solver.with_peak(evaluation)
        bound = solution.bound - prices.byte_seconds * self.solver.room_bytes
        return self._outcome(evaluation, bound)

    def smallest(self, *found: Evaluation) -> Evaluation:
        """Return the smallest plan that recomputes all: of those found so far, and of two at a price above all seconds,
        where the one prices what cannot be made again, the other everything."""
        prices = replace(self.prices, byte_seconds=self.solver.unit_price * DEAREST_PRICE, saved=True)
        blocks = self.solver.blocks
        dual = Dual(self.problem, self.hyperedges, self.allowed, prices, self.restriction.keep, blocks.reruns)
        left, chosen = (min(LARGEST_PROGRAM, n) for n in (self.search.largest_program, self.search.largest_choice))
        search = replace(self.search, largest_program=left, largest_choice=chosen)
        choice = dual.strategies(minimize(dual, self.found, search).choice)
        last = self.solver.with_peak(self.evaluate(prices, {v.index: choice[v.cls] for v in self.problem.vertices}))
        least = min((*found, self.at(prices, search).evaluation, last), key=blocks.least_bytes)
        return self.solver.with_peak(blocks.at_level(least, FULL))

    def evaluate(
        self, prices: Prices, choice: dict[int, int], first: int | None = None, uncharged_bytes: float = 0.0
    ) -> Evaluation:
        """Return the cost of a choice by vertex, of which `first` of the blocks left out decide as block 2 does.
        `uncharged_bytes`: a guess of them, from a plan like it."""
        e = evaluate(self.problem, choice, self.solver.pricer, prices, self.restriction.keep, first)
        return replace(e, uncharged_bytes=uncharged_bytes)

    def _check(self, objective: float, evaluation: Evaluation, prices: Prices) -> None:
        """Raise AssertionError unless the objective of the folded problem is the cost of the unfolded plan."""
        priced = evaluation.priced(prices)
        if abs(priced - objective) > 1e-6 * abs(priced) + 1e-12:
            raise AssertionError(f"the folded objective {objective} is not the unfolded cost {priced}")
