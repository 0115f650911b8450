"""The fastest plan that fits, where the fastest plan of all does not.

Memory enters as a price per byte. For a price L, min (seconds + L * bytes) - L * limit is a lower bound on the seconds
of every plan that fits; the best prices, of memory and of hidden communication together, are found by cutting planes
(autopar/planner/solver/cutting_planes.py). At these prices every op decides together with its sharding whether it runs
again in the backward. The plans that this gives are then made to fit: by as much recomputation as it takes, or, where
there is room left, by parts of faster plans.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial

import numpy as np

from ...plans.program import DecidedProgram
from ...utils.format import size
from ..objective.checkpoint_blocks import recomputed_vertices
from ..objective.evaluate import Evaluation
from ..problem.multipliers import Prices
from ..problem.offload import break_even, offloaded
from . import full_program
from .cutting_planes import FIRST_PRICE
from .dual import Dual
from .interpolate import between, keep_copies, mix
from .last_word import Room, last_word
from .local_search import LocalSearch
from .minimize import ILP, BeyondCutoff, minimize
from .on_host import bound_with_host, fastest_with_host, smallest_with_host
from .search import DEAREST_PRICE, Outcome, RestrictedSearch, fastest_played
from .squeeze import is_small, squeezed

MOST_PRICES = 9  # of one search; the cuts seldom ask for more
MOST_FAILURES = 2  # one after the other, to prove more at other prices
MOST_PRICE = 64.0  # units, in which the whole memory costs as much as all compute
SMALL_DOUBT = 0.003  # of the bound: better prices would hardly say more
# the searches for the bound try a plan at each of their prices: with so many tried, and one that fits, no others are
# looked for; with fewer, few more
ENOUGH_TRIES, FEW_PRICES = 3, 4
# what has to be made to fit is changed more than this anyway, so that its search may stop early
PLAN_GAP, ROUNDS = 5e-3, 40
BOUND_GAP = 1e-2  # of the first searches for the bound
MOST_MIXED = 3  # plans that meet at the highest bound, of which mixtures are tried
MOST_TRIES = 4  # to make one plan fit: what passes by is known afterwards only
SLOWEST = 100.0  # times as long as the fastest plan of all
STEP = 1e-5  # between two points, for a slope
PROGRAM_PRICES = tuple(MOST_PRICE / 4.0**i for i in range(8))  # of memory, at which the full program's choice is tried


class WithinLimit:
    """The second half of a search, whose first half found `fastest`."""

    def __init__(self, run: RestrictedSearch, fastest: Outcome):
        self.run, self.solver, self.problem, self.limit_bytes = run, run.solver, run.problem, run.limit_bytes
        self.first = fastest
        self.kept = [e for e in run.cuts.plans if e.bytes_ <= self.limit_bytes]
        self.fast = fastest.evaluation  # the least memory among fast plans, so far
        self.bound, self.proved_at, self.smallest = fastest.bound_seconds, fastest.proved_at, self.fast
        self.best: Evaluation | None = None
        self.made_of: tuple[Evaluation, Prices] | None = None  # the plan that `best` was made of, and its prices
        self.tried = [(fastest.evaluation, self.solver.free)]
        self.bound_with_host = fastest.bound_seconds
        self.program = DecidedProgram()
        self.dual: Dual | None = None  # and the prices at which most was proved, once there are some
        self.proving = self.solver.free
        self.may_fit: bool | None = None  # not known yet
        self.rough = replace(run.search, gap=max(run.search.gap, PLAN_GAP), rounds=ROUNDS, largest_program=0)

    def outcome(self) -> Outcome:
        """Return the fastest plan found. Raise MemoryInfeasibleError if none fits."""
        first = self.run.accumulates or self.fast.peaks_early
        if self.run.search.solver == ILP:
            self._try_program()
        else:
            for early, is_sure in ((first, False), (not first, True)):
                if self._search(early, is_sure) and self.best is not None or self._is_hopeless():
                    break
        if self.best is not None:
            found = self._finished(self.best)
            return replace(found, ask=partial(self._asked, found)) if self.run.search.asks_later else found
        best, prices = self.run.smallest(self.smallest), self.tried[-1][1]
        fitting = [e for e in [best] if e.bytes_ <= self.limit_bytes]
        tried = [*self.tried, (self.solver.with_peak(self.run.evaluate(prices, best.choice, best.first)), prices)]
        fitting += fastest_with_host(self.solver, tried, fitting[0] if fitting else None)
        fitting = fitting or smallest_with_host(self.solver, tried)
        may_squeeze = self.run.search.squeezes or is_small(self.problem)
        if not fitting and may_squeeze and self.run.search.largest_program and not self._is_hopeless():
            best = squeezed(self.run, best)
            fitting = [e for e in [best] if e.bytes_ <= self.limit_bytes]
        if not fitting:
            kind = "" if self.run.restriction.name == "auto" else f" with strategy {self.run.restriction.name}"
            raise self.solver.refusal(
                f"no plan{kind} fits {size(self.limit_bytes)} a device: the smallest found needs", best
            )
        return fastest_played([replace(self.last, evaluation=e) for e in fitting])

    def _finished(self, best: Evaluation) -> Outcome:
        """Return the fastest of the plans found so far, and of what is made of the best of them."""
        if self.made_of is not None:  # what the limit still has room for, now that it is known what passes by
            self._keep(self._fitted(*self.made_of, self.limit_bytes - best.bytes_)[0])
        best = self.best or best
        self._keep(squeezed(self.run, best))
        best = self.best or best
        with_host = fastest_with_host(self.solver, self.tried, best)
        return fastest_played([replace(self.last, evaluation=e) for e in [best, *self.kept, *with_host]])

    def _asked(self, found: Outcome) -> Outcome:
        """Return the fastest plan after the integer program's last word; `found`: the one before."""
        best = self.best
        self._ask_program()
        if self.best is None or self.best is best:
            return replace(found, program=self.program)
        return self._finished(self.best)

    def _is_hopeless(self) -> bool:
        """Return whether nothing fits that was found, and bounds say that nothing does, at least in any time that
        would be of use."""
        if self.best is not None or self.solver.host_bytes_per_second:
            return False
        if self.may_fit is None:
            self.may_fit = self.solver.may_fit(self.run.restriction, SLOWEST * self.first.evaluation.seconds)
        return not self.may_fit

    @property
    def last(self) -> Outcome:
        """Return the outcome of the search, with the first half's plan."""
        return replace(
            self.first,
            bound_seconds=self.proved_bound,
            fits=True,
            found=tuple(self.run.found),
            program=self.program,
            proved_at=self.proved_at,
        )

    @property
    def proved_bound(self) -> float:
        """Return the seconds that no plan of the search takes less than."""
        return self.bound_with_host if self.solver.host_bytes_per_second else self.bound

    def _try_program(self) -> None:
        """Try what the full integer program chooses, at several prices of what it keeps and computes again."""
        found = full_program.solve(self.run, True)
        if found is not None:
            self.bound = max(self.bound, found.bound)
            choice = {cls: option % len(self.run.allowed[cls]) for cls, option in found.choice.items()}
            free, weights = replace(self.solver.free, saved=True), (0.0,) * self.solver.weights
            for units in PROGRAM_PRICES:
                self._try(self._prices(free, np.array([*weights, units])), choice)

    def _search(self, early: bool, is_sure: bool) -> bool:
        """Search for plans at changing prices of what is held at one of the two peaks. Return False if memory does not
        peak there, unless `is_sure`."""
        free = replace(self.solver.free, saved=early, gradients=float(self.run.accumulates or not early))
        found = self._highest_bound(free, is_sure)
        if found is None:
            return False
        point, plans = found
        if self.best is None or len(self.tried) <= ENOUGH_TRIES and not self._is_near():
            self._bisect(free, point)
        for one, other in itertools.combinations(plans[:MOST_MIXED], 2):
            if self.best is not None and not self._is_near() and one.choice != other.choice:
                self._mix(one, other, self._prices(free, point))
        if not self.run.search.asks_later:
            self._ask_program()
        return True

    def _highest_bound(self, free: Prices, is_sure: bool) -> tuple[np.ndarray, list[Evaluation]] | None:
        """Return where the bound is highest, from the point of view of plans that may recompute, and the plans that
        meet there; None if memory peaks elsewhere. Raise BeyondCutoff if the bound reaches the cutoff."""
        run, cuts = self.run, self.run.cuts.copy()
        cuts.high[-1] = MOST_PRICE
        run.dual.release()
        reruns = self.solver.blocks.reruns if free.saved else ()
        dual = Dual(self.problem, run.hyperedges, run.allowed, free, run.restriction.keep, reruns)
        # Far from where most was proved the search proves little: many plans cost the same where a weight is all.
        around, proved, reach, failures = None, -math.inf, 1.0, 0
        for _ in range(MOST_PRICES):
            point, doubt, met = cuts.highest(self.bound, around, reach)
            if doubt <= SMALL_DOUBT or cuts.is_known(point) or self._is_near():
                break
            prices = self._prices(free, point)
            dual.price(prices)
            starts = [*self.run.found, *([] if self.best is None else [self._joint(dual, self.best)])]
            room = prices.byte_seconds * self.solver.room_bytes
            search = replace(
                run.search, gap=max(run.search.gap, min(doubt / 4, BOUND_GAP)), floor_objective=self.bound + room
            )
            solution = minimize(dual, starts, search)
            here = solution.bound - room
            failures = 0 if here > proved else failures + 1
            around, reach = (around, reach / 2) if failures else (point, reach)
            proved = max(proved, here)
            self.bound_with_host = max(self.bound_with_host, bound_with_host(self.solver, here, prices))
            if here > self.bound:
                self.bound, self.proved_at = here, (prices,)
            if self.proved_bound >= run.search.cutoff_seconds:
                raise BeyondCutoff(self.proved_bound)
            line = self._line(dual, free, point, solution.choice)
            candidate, _ = self._try(prices, dual.strategies(solution.choice))
            if (
                not is_sure
                and candidate.bytes_ > self.limit_bytes
                and (self.run.accumulates or candidate.peaks_early) != free.saved
            ):
                return None
            cuts.add(point, *line, candidate)
            if failures == MOST_FAILURES:
                break
        self.dual, self.proving = dual, self._prices(free, point if around is None else around)
        return point, met

    def _ask_program(self) -> None:
        """Let the integer program decide what is left around the best plan, and try what it finds."""
        search = self.run.search
        if self.best is None or self.dual is None or not (search.last_word and search.largest_program):
            return
        room, joint = Room(self.solver.room_bytes, self.run.accumulates), self._joint(self.dual, self.best)
        said = last_word(self.run, self.dual, self.proving, self.best, joint, room)
        self.program = said.program
        if said.choice is not None:
            self._try(self.proving, self.dual.strategies(said.choice))

    def _mix(self, one: Evaluation, other: Evaluation, prices: Prices) -> None:
        """Try plans that decide in the first blocks as one plan does and in the last as another, each with what it
        recomputes."""

        def evaluate(choice: dict[int, int], first: int) -> Evaluation:
            e = self.run.evaluate(prices, choice, first, one.uncharged_bytes)
            return self.solver.blocks.fit(e, self.limit_bytes, prices)[0] or e

        self.solver.report("mixing plans")
        mixed = between(self.problem, one, other, evaluate, self.limit_bytes)
        candidate = self.solver.with_peak(self.run.evaluate(prices, mixed.choice, mixed.first))
        self.tried.append((candidate, prices))
        self._keep(self._fitted(candidate, prices)[0], (candidate, prices))

    def _keep(self, e: Evaluation | None, made_of: tuple[Evaluation, Prices] | None = None) -> None:
        """Remember a plan that fits, with what it was made of."""
        if e is not None:
            self.kept.append(e)
            if self.best is None or e.seconds < self.best.seconds:
                self.best, self.made_of = e, made_of

    def _joint(self, dual: Dual, e: Evaluation) -> dict[int, int]:
        """Return an evaluated plan as a choice of options."""
        rerun = {self.problem.vertices[v].cls for v in recomputed_vertices(e)} & dual.reruns
        choice = {v.cls: e.choice[v.index] for v in self.problem.vertices}
        return {cls: k + len(dual.allowed[cls]) if cls in rerun else k for cls, k in choice.items()}

    def _bisect(self, free: Prices, point: np.ndarray) -> None:
        """Try plans around a point. A price is right when the dearest recomputation that a plan needs is as dear as the
        price: then neither more sharding nor more recomputation would be cheaper."""
        host = break_even(self.problem, free.gradients)
        low, high, seen = 0.0, None, []
        price = max(point[-1], FIRST_PRICE) if host is None else host / self.solver.unit_price
        for _ in range(MOST_PRICES if self.best is None else FEW_PRICES):
            prices = self._prices(free, np.array([*point[:-1], price]))
            candidate, dearest = self._try(prices)
            if self._is_near() or self.best is not None and candidate.choice in seen:
                break
            seen.append(candidate.choice)
            if dearest > prices.byte_seconds:
                low = price
            else:
                high = price
            if high is not None and high < 1.1 * low or low > DEAREST_PRICE:
                break
            price = 8 * price if high is None else math.sqrt(low * high) if low else high / 8

    def _is_near(self) -> bool:
        return self.best is not None and self.run.is_near(self.best, self.bound)

    def _prices(self, free: Prices, point: np.ndarray) -> Prices:
        return replace(free.at(point), byte_seconds=float(point[-1]) * self.solver.unit_price)

    def _line(self, dual: Dual, free: Prices, point: np.ndarray, choice: dict[int, int]) -> tuple[float, np.ndarray]:
        """Return what a choice costs at a point, less what the limit is worth there, and its slopes. Around the point
        the cost is linear, so that a difference is the slope."""

        points = [point, *(point + STEP * axis for axis in np.eye(len(point)))]
        costs = LocalSearch(dual).objectives(choice, [self._prices(free, at) for at in points])
        room = self.solver.unit_price * self.solver.room_bytes
        here, *others = (cost - at[-1] * room for cost, at in zip(costs, points))
        return here, np.array([(other - here) / STEP for other in others])

    def _try(self, prices: Prices, choice: dict[int, int] | None = None) -> tuple[Evaluation, float]:
        """Return the plan of a choice by class, by default of the one that costs least at these prices without
        recomputation, and what a byte costs that is recomputed to make it fit, infinite if it does not. Keep the
        fastest one that fits."""
        self.solver.report(f"memory price {prices.byte_seconds / self.solver.unit_price:.3g}")
        if choice is None:
            candidate = self.run.at(prices, self.rough).evaluation
        else:
            candidate = self.run.evaluate(prices, {v.index: choice[v.cls] for v in self.problem.vertices})
            candidate = self.solver.with_peak(candidate)
        self.tried.append((candidate, prices))
        self.smallest = min(self.smallest, candidate, key=self.solver.blocks.least_bytes)
        fitted, dearest = self._fitted(candidate, prices)
        self._keep(fitted, (candidate, prices))
        if self.limit_bytes < candidate.bytes_ < self.fast.bytes_:
            self.fast = candidate
        return candidate, dearest

    def _fitted(self, candidate: Evaluation, prices: Prices, more: float = 0.0) -> tuple[Evaluation | None, float]:
        """Return `candidate` as it fits: with blocks recomputed, or, if there is room, with as much as there is room
        for of a faster plan and of copies kept for the backward; and the price in seconds a byte of what it recomputes.
        `more`: bytes by which less is expected to be alive at its peak than in the candidate. Return None and infinity
        if it does not fit."""
        limit, evaluate = (
            self.limit_bytes + more,
            partial(self.run.evaluate, prices, uncharged_bytes=candidate.uncharged_bytes),
        )
        for _ in range(MOST_TRIES):
            fitted, dearest = self.solver.blocks.fit(candidate, limit, prices)
            if fitted is None:
                break
            if dearest == 0.0:
                fitted = mix(self.problem, fitted, self.fast, limit, evaluate)
            if self.run.restriction.keep is None:
                fitted = keep_copies(self.problem, fitted, limit, self.solver.pricer)
            counted, fitted = fitted.bytes_, self.solver.with_peak(fitted)
            if fitted.bytes_ <= self.limit_bytes:
                return self._filled(fitted, prices), dearest
            # more passes by in this plan than in the one that it was made of; what it was made to fit may be left over
            limit = min(limit, counted) - (fitted.bytes_ - self.limit_bytes)
        return None, math.inf

    def _filled(self, fitted: Evaluation, prices: Prices) -> Evaluation:
        """Return a plan that has parameters on the host, with as many of them on the device as there is room for, or as
        what is cheaper to compute again makes room for."""
        price = break_even(self.problem, self.run.prices.gradients)
        if price is None or not offloaded(self.problem, fitted).parameters:
            return fitted
        blocks, room = self.solver.blocks, self.limit_bytes
        for turn in range(MOST_TRIES):
            evaluate = partial(self.run.evaluate, prices, uncharged_bytes=fitted.uncharged_bytes)
            plain = evaluate(fitted.choice, fitted.first)
            room += 0.0 if turn else blocks.freed_bytes(plain, price, self.run.prices)
            more = mix(self.problem, plain, self.fast, room, evaluate)
            less, _ = blocks.fit(more, self.limit_bytes, self.run.prices)
            less = self.solver.with_peak(less or more)
            if less.bytes_ <= self.limit_bytes and less.seconds >= fitted.seconds:
                break
            if less.bytes_ <= self.limit_bytes:
                fitted = less
            else:
                room -= less.bytes_ - self.limit_bytes
        return fitted
