"""The prices that prove most, by cutting planes (Kelley, SIAM J. 8(4), 1960).

For given prices the search returns the plan that costs least. What that plan costs is linear in the prices, and no
prices prove more than the plan costs at them: a cut. The highest point under all cuts so far is where to search next.
Its multipliers say in what shares the plans that meet there would have to be mixed to cost as little as the bound.

A point is (weights of the classes of links, span by span, price of a byte in units). Weights of a span add up to one at
most: what is left is the compute stream's.
"""

from __future__ import annotations

import numpy as np

from ..objective.evaluate import Evaluation

FIRST_PRICE, MOST_GROWTH = 0.05, 4.0
LEAST_SHARE = 1e-3
LITTLE_KNOWN = 0.05
SAME = 2e-3
REACH = 0.1  # of weights around a point


class Cuts:
    """The cutting planes found so far: an upper estimate of the bound, for prices between `low` and `high`."""

    def __init__(self, low: tuple[float, ...], high: tuple[float, ...], classes: int = 1):
        """`classes`: so many neighbouring prices, the last one left out, are weights of one span."""
        self.low, self.high, self.classes = np.array(low), np.array(high), classes
        self.points: list[np.ndarray] = []
        self.plans: list[Evaluation] = []
        self._seconds: list[float] = []
        self._slopes: list[np.ndarray] = []

    def copy(self) -> Cuts:
        """Return a copy of what is known, to go on from."""
        other = Cuts(tuple(self.low), tuple(self.high), self.classes)
        other.points, other.plans = list(self.points), list(self.plans)
        other._seconds, other._slopes = list(self._seconds), list(self._slopes)
        return other

    def add(self, point: np.ndarray, seconds: float, slope: np.ndarray, plan: Evaluation) -> None:
        """Add a plan found at a point: its priced seconds there, and how fast they grow with each price."""
        self.points.append(point)
        self.plans.append(plan)
        self._seconds.append(seconds)
        self._slopes.append(slope)

    def highest(
        self, bound: float, around: np.ndarray | None = None, reach: float = 1.0
    ) -> tuple[np.ndarray, float, list[Evaluation]]:
        """Return where to search next, how much more than `bound` other prices may prove (as a share of it), and the
        plans that meet at the highest point, those with the largest shares first. Look no farther `around` a point than
        REACH times `reach`, and than its price of memory times that."""
        from ortools.math_opt.python import mathopt

        model = mathopt.Model()
        low, high = self.low, self.high
        if around is not None:
            far = reach * np.array([*(REACH for _ in around[:-1]), around[-1]])
            low, high = np.maximum(low, around - far / 2), np.minimum(high, around + far)
        prices = [model.add_variable(lb=least, ub=most) for least, most in zip(low.tolist(), high.tolist())]
        for span in range(0, len(prices) - 1, self.classes) if self.classes > 1 else ():
            model.add_linear_constraint(sum(prices[span : span + self.classes]) <= 1.0)
        most = model.add_variable()
        cuts = []
        for point, seconds, slope in zip(self.points, self._seconds, self._slopes):
            change = sum(s * (price - at) for s, price, at in zip(slope.tolist(), prices, point.tolist()))
            cuts.append(model.add_linear_constraint(most <= seconds + change))
        model.maximize(most)
        solved = mathopt.solve(model, mathopt.SolverType.GLOP)
        at, shares = solved.variable_values(), [abs(share) for share in solved.dual_values(cuts)]
        met = sorted((i for i, share in enumerate(shares) if share > LEAST_SHARE), key=lambda i: -shares[i])
        doubt = (at[most] - bound) / abs(bound)
        point = np.array([at[price] for price in prices])
        near = self._near(point, doubt)
        return point if self.is_known(near) else near, doubt, [self.plans[i] for i in met]

    def is_known(self, point: np.ndarray) -> bool:
        """Return whether a search was made so near that another would hardly find anything new."""
        return any(np.abs(point - other).max() < SAME for other in self.points)

    def _near(self, point: np.ndarray, doubt: float) -> np.ndarray:
        """Return where to search on the way to `point`: at a price of memory that grows by no more than MOST_GROWTH,
        and while little is known at weights half way there from the best point so far: far from the best prices plans
        are of no use, and long to search for."""
        price = min(point[-1], max(FIRST_PRICE, MOST_GROWTH * max(p[-1] for p in self.points)))
        if doubt > LITTLE_KNOWN:
            point = (point + self.points[int(np.argmax(self._seconds))]) / 2
        return np.array([*point[:-1], price])
