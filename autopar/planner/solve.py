"""The search for a plan under a memory limit, and the same search for the expert strategies.

Memory enters as a price per byte, and communication that may hide behind compute as a weight (autopar/planner/prices.py). With the
smallest price the plan is the fastest there is; if it does not fit, the price is raised by bisection. For a price L,
min (seconds + L * bytes) - L * limit is a lower bound on the seconds of every plan that fits, so the best bound over all prices
certifies the result. A plan that nearly fits may recompute blocks instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ..errors import AutoparError, MemoryInfeasibleError
from ..view.units import size
from .ascend import Search, minimize
from .blocks import FULL, Blocks
from .dual import Dual
from .evaluate import Evaluation, Pricer, evaluate
from .hubs import HubPrices, hubs_of
from .live_bytes import LiveBytes, live_bytes
from .mix import between, keep_copies, mix
from .prices import Prices
from .problem import Problem
from .restrict import Restriction, allowed_strategies
from .tensor_plan import TensorPlan
from .tied import Tied

MOST_PRICES = 9
MOST_TRIES = 4
BASELINE_GAP = 5e-3  # good enough for a plan that is only compared with
MOST_WEIGHTS = 6


@dataclass
class Outcome:
    """A plan's cost on the unfolded graph, with the bound that certifies it."""

    restriction: Restriction
    evaluation: Evaluation
    bound_seconds: float
    fits: bool

    @property
    def gap(self) -> float:
        seconds = self.evaluation.seconds
        return max(0.0, 1.0 - self.bound_seconds / seconds) if seconds else 0.0  # a model may compute nothing


class Solver:
    """Searches one problem under one memory limit. `overlap`: share of a second that is gained when communication runs beside
    compute. `report(text)` is told what is being done."""

    def __init__(self, problem: Problem, pricer: Pricer, limit_bytes: float, search: Search = Search(),
                 report: Callable[[str], None] = lambda text: None, overlap: float = 0.0):  # fmt: skip
        self.problem, self.pricer, self.limit_bytes = problem, pricer, limit_bytes
        self.search, self.report, self.blocks = search, report, Blocks(problem)
        self.hubs = [HubPrices(problem, pricer, hub) for hub in hubs_of(problem)]
        self.found: list[dict[int, int]] = []  # choices of all searches so far: each next one starts from the best of them
        fastest = sum(float(c.seconds.min()) * c.copies for c in problem.classes.values())
        self.unit_price = max(fastest, 1e-6) / limit_bytes  # at which the whole memory costs as much as all compute
        weight = 1.0 - overlap
        # among equally fast plans the smaller one
        self.free = Prices(self.unit_price * 1e-5, gradients=0.0, hidden_forward=weight, hidden_backward=weight, overlap=overlap)

    def solve(self, restriction: Restriction, pins: dict[str, str] | None = None) -> Outcome:
        """The fastest plan that fits. Raises MemoryInfeasibleError with what is missing."""
        run = _Run(self, restriction, allowed_strategies(self.problem, restriction, pins), self.search)
        fastest = run.fastest()
        return fastest if fastest.fits else run.within_limit(fastest)

    def settled(self, e: Evaluation) -> Evaluation:
        """The evaluation with all that is alive at its peak."""
        return replace(e, passing_bytes=self._live(e).peak_bytes - e.charged_bytes)

    def _live(self, e: Evaluation) -> LiveBytes:
        self.problem.split(e.first)
        return live_bytes(self.problem, e, self.pricer)

    def fastest(self, restriction: Restriction, pins: dict[str, str] | None = None) -> Outcome:
        """The fastest plan, whether it fits or not."""
        return _Run(self, restriction, allowed_strategies(self.problem, restriction, pins), self.search).fastest()

    def smallest(self, restriction: Restriction, pins: dict[str, str] | None = None) -> Evaluation:
        """A plan that holds few bytes, whatever time it takes: what does not fit so is not likely to fit otherwise."""
        return _Run(self, restriction, allowed_strategies(self.problem, restriction, pins), self.search).smallest()

    def refusal(self, message: str, smallest: Evaluation) -> MemoryInfeasibleError:
        """The error of a message that ends before the bytes that are needed; `smallest`: a plan that needs fewest."""
        need, missing = smallest.bytes_, smallest.bytes_ - self.limit_bytes
        times, enough = math.ceil(need / self.limit_bytes), size(1.01 * need).replace(" ", "")
        return MemoryInfeasibleError(
            f"{message} {size(need)}, {size(missing)} more",
            missing_bytes=math.ceil(missing), breakdown=self._live(smallest).at_peak, mesh=self.problem.mesh,
            fix=f"about {times}x the devices, a smaller batch, or memory={enough} would fit",
        )  # fmt: skip

    def baseline(self, name: str, styles: Mapping[str, str] | None = None) -> Outcome | AutoparError:
        """An expert strategy as experts use it, or with `styles` the model's own: the fastest plan, whether it fits or not."""
        try:
            mesh = self.problem.mesh
            restriction = Restriction.of_model(TensorPlan(tuple(styles.items())), mesh) if styles else Restriction.of(name, mesh)
            self.report(name)
            search = replace(self.search, gap=max(self.search.gap, BASELINE_GAP))
            return _Run(self, restriction, allowed_strategies(self.problem, restriction), search).fastest()
        except AutoparError as error:
            return error


class _Run:
    """One search: the allowed strategies of one restriction at changing prices."""

    def __init__(self, solver: Solver, restriction: Restriction, allowed: dict[int, np.ndarray], search: Search):
        self.solver, self.restriction, self.allowed, self.search = solver, restriction, allowed, search
        self.problem, self.limit_bytes = solver.problem, solver.limit_bytes
        self.dual = Dual(solver.problem, solver.hubs, allowed, solver.free, restriction.keep)
        self.with_recompute: Dual | None = None
        self.prices = solver.free
        self.passing_bytes = 0.0  # of the last plan: a guess for the next one

    def fastest(self) -> Outcome:
        """The fastest plan, whether it fits or not."""
        best = self.at(self.prices)
        bound = best.bound_seconds
        low, high = {}, {}
        tried, before = best, None
        for _ in range(MOST_WEIGHTS):
            if not self.prices.overlap or best.evaluation.seconds - bound <= self.search.gap * best.evaluation.seconds:
                break
            for phase in ("forward", "backward"):  # what does not hide weighs more
                (low if tried.evaluation.exposed(phase) > 0 else high)[phase] = self.prices.hidden(phase)
            weight = {p: self._next_weight(low.get(p), high.get(p)) for p in ("forward", "backward")}
            prices = replace(self.prices, hidden_forward=weight["forward"], hidden_backward=weight["backward"])
            if prices == self.prices:
                break
            self.prices, before, tried = prices, tried, self.at(prices)
            bound = max(bound, tried.bound_seconds)
            mixed = self._settled(between(self.problem, before.evaluation, tried.evaluation, partial(self._judge, prices)))
            if mixed.seconds < best.evaluation.seconds:
                best = Outcome(self.restriction, mixed, bound, mixed.bytes_ <= self.limit_bytes)
        return replace(best, bound_seconds=min(bound, best.evaluation.seconds))

    def _next_weight(self, low: float | None, high: float | None) -> float:
        """Of hidden communication: between one that is too little, or the least there is, and one that is too much, or 1."""
        least = 1.0 - self.prices.overlap
        if low is None:
            return least
        if high is None:
            return (low + 1.0) / 2 if low == least else 1.0
        return (low + high) / 2

    def at(self, prices: Prices) -> Outcome:
        """The plan that costs least at these prices."""
        self.dual.price(prices)
        solution = minimize(self.dual, self.solver.found, self.search)
        self.solver.found.append(solution.choice)
        evaluation = self._judge(prices, {v.index: solution.choice[v.cls] for v in self.problem.vertices})
        self._check(solution.objective, evaluation, prices)
        evaluation = self._settled(evaluation)
        bound = solution.bound - prices.byte_seconds * self.limit_bytes
        return Outcome(self.restriction, evaluation, bound, evaluation.bytes_ <= self.limit_bytes)

    def _judge(self, prices: Prices, choice: dict[int, int]) -> Evaluation:
        """Cost of a choice by vertex, with what passes by as in the last plan."""
        restriction = self.restriction
        e = evaluate(self.problem, choice, self.solver.pricer, prices, restriction.keep, restriction.whole_gradients)
        return replace(e, passing_bytes=self.passing_bytes)

    def _settled(self, e: Evaluation) -> Evaluation:
        """`Solver.settled`, remembered for the plans that are judged next."""
        e = self.solver.settled(e)
        self.passing_bytes = e.passing_bytes
        return e

    def within_limit(self, fastest: Outcome) -> Outcome:
        """The fastest plan that fits. A price is right when the dearest recomputation that a plan needs is as dear as the price:
        then neither more sharding nor more recomputation would be cheaper."""
        bound, best = fastest.bound_seconds, None
        low, high, price = 0.0, None, self.solver.unit_price
        smallest = fast = last = fastest.evaluation
        seen: list[dict[int, int]] = []
        for _ in range(MOST_PRICES):
            self.solver.report(f"memory price {price / self.solver.unit_price:.3g}")
            # memory peaks when the forward ends, or where gradients are more than activations, when the backward ends
            accumulated = self.solver.pricer.micro_batches > 1  # then gradients of earlier passes are there all the time
            at_end = not accumulated and last.gradient_bytes + last.whole_gradient_bytes > last.saved_bytes
            prices = replace(self.prices, byte_seconds=price, saved=not at_end, gradients=float(at_end or accumulated))
            lower, tried = self._recomputing(prices)
            bound, smallest = max(bound, lower), min(smallest, tried, key=self.solver.blocks.least_bytes)
            fitted, dearest = self._fitted(tried, fast, prices)
            if fitted is not None and (best is None or fitted.seconds < best.seconds):
                best = fitted
            last = tried
            if tried.bytes_ > self.limit_bytes:
                fast = tried
            if best is not None and best.seconds - bound <= self.search.gap * best.seconds:
                break
            if tried.choice in seen:
                break  # a lower price finds nothing new
            seen.append(tried.choice)
            if fitted is None or dearest > price:
                low = price
            else:
                high = price
            if high is None:
                price *= 8
            elif high < 1.1 * low:
                break
            else:
                price = float(np.sqrt(low * high)) if low else high / 8
        if best is None:
            best = self.smallest(smallest)
        if best.bytes_ > self.limit_bytes:
            raise self._refusal(best)
        return Outcome(self.restriction, best, min(bound, best.seconds), True)

    def _fitted(self, tried: Evaluation, fast: Evaluation, prices: Prices) -> tuple[Evaluation | None, float]:
        """`tried` as it fits: with blocks recomputed, or, if there is room, with as much as there is of a faster plan and of copies
        kept for the backward; and the price in seconds a byte of what it recomputes."""
        limit, judge = self.limit_bytes, partial(self._judge, prices)
        for _ in range(MOST_TRIES):
            self.passing_bytes = tried.passing_bytes
            fitted, dearest = self.solver.blocks.fit(tried, limit)
            if fitted is None:
                break
            if dearest == 0.0:
                fitted = between(self.problem, fitted, fast, judge, limit)
                fitted = mix(self.problem, fitted, fast, limit, judge)
            if self.restriction.keep is None:
                fitted = keep_copies(self.problem, fitted, limit, self.solver.pricer)
            fitted = self._settled(fitted)
            if fitted.bytes_ <= self.limit_bytes:
                return fitted, dearest
            limit -= fitted.bytes_ - self.limit_bytes  # more passes by in this plan than in the one that it was made of
        return None, math.inf

    def _recomputing(self, prices: Prices) -> tuple[float, Evaluation]:
        """A bound that also holds for plans that recompute, and the plan that costs least when recomputing is allowed."""
        if self.with_recompute is None:
            inner = self.solver.blocks.inner
            self.with_recompute = Dual(self.problem, self.solver.hubs, self.allowed, prices, self.restriction.keep, inner)
        else:
            self.with_recompute.price(prices)
        solution = minimize(self.with_recompute, self.solver.found, self.search)
        self.solver.found.append(solution.choice)
        evaluation = self._judge(prices, {v.index: solution.choice[v.cls] for v in self.problem.vertices})
        self.dual.price(prices)
        self._check(Tied(self.dual).objective(solution.choice), evaluation, prices)
        return solution.bound - prices.byte_seconds * self.limit_bytes, self._settled(evaluation)

    def _check(self, objective: float, evaluation: Evaluation, prices: Prices) -> None:
        """The objective of the folded problem must be the cost of the unfolded plan."""
        priced = evaluation.priced(prices)
        if abs(priced - objective) > 1e-6 * abs(priced) + 1e-12:
            raise AssertionError(f"the folded objective {objective} is not the unfolded cost {priced}")

    def smallest(self, *found: Evaluation) -> Evaluation:
        """The smallest plan that recomputes all: of those found so far, and of one at a price above all seconds."""
        prices = replace(self.prices, byte_seconds=self.solver.unit_price * 1e4, saved=True)
        least = min((*found, self._recomputing(prices)[1]), key=self.solver.blocks.least_bytes)
        return self._settled(self.solver.blocks.at_level(least, FULL))

    def _refusal(self, smallest: Evaluation) -> MemoryInfeasibleError:
        kind = "" if self.restriction.name == "auto" else f" with strategy {self.restriction.name}"
        return self.solver.refusal(f"no plan{kind} fits {size(self.limit_bytes)} a device: the smallest found needs", smallest)
