"""The search for a plan under a memory limit, and the same search for the expert strategies.

Memory enters as a price per byte. With the smallest price the plan is the fastest there is; if it does not fit, the price is
raised by bisection. For a price L, min (seconds + L * bytes) - L * limit is a lower bound on the seconds of every plan that
fits, so the best bound over all prices certifies the result. A plan that nearly fits may recompute blocks instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ..errors import AutoparError, MemoryInfeasibleError
from .ascend import Search, minimize
from .blocks import Blocks
from .dual import Dual
from .evaluate import Evaluation, Pricer, evaluate
from .mix import keep_copies, mix
from .problem import Problem
from .program import Solution
from .restrict import RECIPES, Restriction, allowed_strategies

MOST_PRICES = 9
SWEEPS_FOR_RECOMPUTE = 16
BASELINE_GAP = 5e-3  # good enough for a plan that is only compared with


@dataclass
class Outcome:
    """A plan's cost on the unfolded graph, with the bound that certifies it."""

    restriction: Restriction
    evaluation: Evaluation
    bound_seconds: float
    fits: bool
    smallest_bytes: float = 0.0  # of all plans tried

    @property
    def gap(self) -> float:
        seconds = self.evaluation.seconds
        return max(0.0, 1.0 - self.bound_seconds / seconds) if seconds else 0.0  # a model may compute nothing


class Solver:
    """Searches one problem under one memory limit. `report(text)` is told what is being done."""

    def __init__(self, problem: Problem, pricer: Pricer, limit_bytes: float, search: Search = Search(),
                 report: Callable[[str], None] = lambda text: None):  # fmt: skip
        self.problem, self.pricer, self.limit_bytes = problem, pricer, limit_bytes
        self.search, self.report, self.blocks = search, report, Blocks(problem)
        self.found: list[dict[int, int]] = []  # choices of all searches so far: each next one starts from the best of them
        fastest = sum(float(c.seconds.min()) * len(c.members) for c in problem.classes.values())
        self.unit_price = (
            max(fastest, 1e-6) / limit_bytes
        )  # a price at which the whole memory costs as much as all compute
        self.tie_price = self.unit_price * 1e-5  # among equally fast plans the smaller one

    def solve(
        self, restriction: Restriction, pins: dict[str, str] | None = None, start: dict[int, int] | None = None
    ) -> Outcome:
        """The fastest plan that fits. Raises MemoryInfeasibleError with what is missing."""
        allowed = allowed_strategies(self.problem, restriction, pins)
        fastest = self._at_price(restriction, allowed, self.tie_price, price_saved=False)
        if fastest.fits:
            return fastest
        return self._raise_price(restriction, allowed, fastest)

    def baseline(self, name: str) -> Outcome | AutoparError:
        """An expert strategy as experts use it: the fastest plan, whether it fits or not."""
        try:
            restriction = Restriction.of(name, self.problem.mesh)
            self.report(name)
            allowed = allowed_strategies(self.problem, restriction)
            search = replace(self.search, gap=max(self.search.gap, BASELINE_GAP))
            return self._at_price(restriction, allowed, self.tie_price, False, search)
        except AutoparError as error:
            return error

    def baselines(self) -> dict[str, Outcome | AutoparError]:
        return {name: self.baseline(name) for name in RECIPES}

    def _minimize(self, restriction: Restriction, allowed, price: float, price_saved: bool, search: Search) -> Solution:
        solution = minimize(self.problem, self.pricer, allowed, price, price_saved, restriction.keep, self.found, search)
        self.found.append(solution.choice)
        return solution

    def _at_price(
        self, restriction: Restriction, allowed, price: float, price_saved: bool, search: Search | None = None
    ) -> Outcome:
        solution = self._minimize(restriction, allowed, price, price_saved, search or self.search)
        evaluation = self._judge(restriction, price, {v.index: solution.choice[v.cls] for v in self.problem.vertices})
        self._check(solution.objective, evaluation, price, price_saved)
        bound = solution.bound - price * self.limit_bytes
        return Outcome(restriction, evaluation, bound, evaluation.bytes_ <= self.limit_bytes, evaluation.bytes_)

    def _judge(self, restriction: Restriction, price: float, choice: dict[int, int]) -> Evaluation:
        """Cost of a choice by vertex."""
        return evaluate(self.problem, choice, self.pricer, price, restriction.keep, restriction.whole_gradients)

    def _check(self, objective: float, evaluation: Evaluation, price: float, price_saved: bool) -> None:
        """The objective of the folded problem must be the cost of the unfolded plan."""
        priced = evaluation.resident_bytes + (evaluation.saved_bytes if price_saved else 0.0)
        again = evaluation.seconds + price * priced
        if abs(again - objective) > 1e-6 * abs(objective) + 1e-12:
            raise AssertionError(f"the folded objective {objective} is not the unfolded cost {again}")

    def _raise_price(self, restriction: Restriction, allowed, fastest: Outcome) -> Outcome:
        best: Outcome | None = None
        bound, smallest = fastest.bound_seconds, fastest.evaluation.bytes_
        lean, lean_price = None, 0.0  # the fastest that fits as it is
        fast = replace(fastest.evaluation)  # the one of the nearest price that does not fit
        best = self._recomputed(fastest, best)
        low, high, price = None, None, self.unit_price * 0.05
        for _ in range(MOST_PRICES):
            self.report(f"memory price {price / self.unit_price:.3g}")
            tried = self._at_price(restriction, allowed, price, price_saved=True)
            lower, rounded = self._with_recompute(restriction, allowed, price)
            bound = max(bound, lower)
            smallest = min(smallest, tried.evaluation.bytes_)
            if np.isfinite(rounded.seconds):
                best = self._recomputed(Outcome(restriction, rounded, lower, False), best)
            if tried.fits:
                high = price
                if lean is None or tried.evaluation.seconds < lean.seconds:
                    lean, lean_price = tried.evaluation, price
            else:
                low, fast = price, replace(tried.evaluation)
                best = self._recomputed(tried, best)
            if lean is not None:
                lean = self._mixed(restriction, lean, lean_price, fast)
                if best is None or lean.seconds < best.evaluation.seconds:
                    best = Outcome(restriction, lean, bound, True)
            if best is not None and best.evaluation.seconds - bound <= self.search.gap * best.evaluation.seconds:
                break
            if high is None and price > 100 * self.unit_price and best is not None:
                break  # only recomputation helps any more
            if high is None:
                price *= 6
            elif low is None:
                price /= 6
            elif high / low < 1.05:
                break
            else:
                price = float(np.sqrt(low * high))
        if best is None:
            self._refuse(restriction, allowed, smallest)
        return Outcome(restriction, best.evaluation, bound, True, smallest)

    def _mixed(self, restriction: Restriction, lean: Evaluation, price: float, fast: Evaluation) -> Evaluation:
        """The fastest found between a plan that fits and one that does not."""
        mixed = mix(self.problem, lean, fast, self.limit_bytes, partial(self._judge, restriction, price))
        return mixed if restriction.keep is not None else keep_copies(self.problem, mixed, self.limit_bytes, self.pricer)

    def _with_recompute(self, restriction: Restriction, allowed, price: float) -> tuple[float, Evaluation]:
        """A bound that also holds for plans that recompute, and the plan that its dual rounds to."""
        dual = Dual(self.problem, self.pricer, allowed, price, True, restriction.keep, self.blocks.inner)
        for _ in range(SWEEPS_FOR_RECOMPUTE):
            dual.sweep(True)
            dual.sweep(False)
        choice = dual.round()
        self.found.append(choice)
        evaluation = self._judge(restriction, price, {v.index: choice[v.cls] for v in self.problem.vertices})
        return dual.bound() - price * self.limit_bytes, evaluation

    def _recomputed(self, tried: Outcome, best: Outcome | None) -> Outcome | None:
        evaluation = self.blocks.fit(tried.evaluation, self.pricer, self.limit_bytes)
        if evaluation is None or (best is not None and best.evaluation.seconds <= evaluation.seconds):
            return best
        return Outcome(tried.restriction, evaluation, tried.bound_seconds, True)

    def _refuse(self, restriction: Restriction, allowed, smallest: float) -> None:
        dearest = self._at_price(restriction, allowed, self.unit_price * 1e4, price_saved=True).evaluation
        without = dearest.resident_bytes
        options = self.blocks.recomputation(dearest, self.pricer)
        freed = sum(r.freed_bytes for r in options) - max((r.freed_bytes for r in options), default=0.0)
        need = min(smallest, dearest.bytes_ - max(freed, 0.0))
        missing = need - self.limit_bytes
        factor = int(np.ceil(need / self.limit_bytes))
        kind = "" if restriction.name == "auto" else f" with strategy {restriction.name}"
        raise MemoryInfeasibleError(
            f"no plan{kind} fits {self.limit_bytes / 2**30:.3g} GiB a device: the smallest found needs "
            f"{need / 2**30:.3g} GiB, {missing / 2**30:.3g} GiB more",
            missing_bytes=int(missing),
            breakdown={"parameters, gradients and optimizer": without, "saved for the backward": need - without},
            mesh=self.problem.mesh,
            fix=f"about {factor}x the devices, a smaller batch, or memory={1.01 * need / 2**30:.3g}GiB would fit",
        )
