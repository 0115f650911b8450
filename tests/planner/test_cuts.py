"""Cutting planes: what they promise is never less than there is, and they end at the highest point."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ortools.math_opt.python import mathopt

from autopar.planner.solver.cutting_planes import SAME, Cuts

LOW, HIGH = np.zeros(3), np.array([1.0, 1.0, 4.0])
ENOUGH = 1e-3  # of doubt
MOST_SEARCHES = 200


class Plans:
    """Lines of which the lowest is what a search finds: a concave function of three prices, as the planner's bound
    is."""

    def __init__(self, seed: int, count: int):
        rng = np.random.default_rng(seed)
        self.seconds, self.slopes = rng.uniform(1.0, 2.0, count), rng.normal(0.0, 0.5, (count, 3))

    def cheapest(self, point: np.ndarray) -> tuple[int, float]:
        values = self.seconds + self.slopes @ point
        return int(values.argmin()), float(values.min())

    def highest(self) -> float:
        model = mathopt.Model()
        prices = [model.add_variable(lb=low, ub=high) for low, high in zip(LOW.tolist(), HIGH.tolist())]
        most = model.add_variable()
        for seconds, slope in zip(self.seconds.tolist(), self.slopes.tolist()):
            model.add_linear_constraint(most <= seconds + sum(s * price for s, price in zip(slope, prices)))
        model.maximize(most)
        return mathopt.solve(model, mathopt.SolverType.GLOP).objective_value()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12))
def test_they_end_at_the_highest_point(seed, count):
    plans = Plans(seed, count)
    highest = plans.highest()
    cuts, point, bound = Cuts(tuple(LOW), tuple(HIGH)), LOW, -np.inf
    for _ in range(MOST_SEARCHES):
        found, seconds = plans.cheapest(point)
        bound = max(bound, seconds)
        cuts.add(point, seconds, plans.slopes[found], found)
        point, doubt, met = cuts.highest(bound)
        assert bound * (1 + doubt) >= highest - 1e-9  # the promise
        assert (LOW - 1e-9 <= point).all() and (point <= HIGH + 1e-9).all() and set(met) <= set(range(count))
        if doubt <= ENOUGH or cuts.is_known(point):
            break
    steepest = np.abs(plans.slopes).sum(1).max()  # between a known point and its neighbours
    assert bound <= highest + 1e-9 and highest - bound <= max(ENOUGH * bound, SAME * steepest)


def test_a_copy_learns_alone():
    cuts = Cuts((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    cuts.add(np.zeros(3), 1.0, np.array([1.0, 0.0, 0.0]), "slow")
    other = cuts.copy()
    other.add(np.ones(3), 1.5, np.array([-1.0, 0.0, 0.0]), "fast")
    assert len(cuts.points) == 1 and len(other.points) == 2
    assert cuts.highest(1.0)[1] == pytest.approx(1.0)  # one line rises to 2 at the border
    _, doubt, met = other.highest(1.5)
    assert doubt == pytest.approx(0.25 / 1.5) and set(met) == {"slow", "fast"}
