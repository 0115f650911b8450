"""Plans between two others: the price at which both cost the same, and that only pipelines that leave memory ask."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.planner.pipeline.between import _where_equal, plans_between
from autopar.planner.problem.multipliers import Prices


@dataclass(frozen=True)
class Cost:
    """A plan of so many seconds and bytes."""

    seconds: float
    bytes_: float

    def priced(self, prices: Prices) -> float:
        return self.seconds + prices.byte_seconds * self.bytes_


@given(*(st.floats(0.1, 10.0) for _ in range(4)))
def test_plans_cost_the_same_at_the_price(seconds, faster_by, bytes_, more):
    lean, fast = Cost(seconds + faster_by, bytes_), Cost(seconds, bytes_ + more)
    prices = Prices(byte_seconds=_where_equal(lean, fast, Prices()))
    assert prices.byte_seconds > 0 and lean.priced(prices) == pytest.approx(fast.priced(prices))
    assert _where_equal(fast, lean, Prices()) == 0.0  # the faster plan is never the one that holds less


@pytest.mark.parametrize("fits, recomputes, saves", [(False, 0.0, 0.5), (True, 0.1, 0.5), (True, 0.0, 0.001)])
def test_nothing_is_searched_for_where_it_is_of_no_use(fits, recomputes, saves):
    """No pipeline fits as it is, or none is much faster: the search, which has no plans here, is not asked."""
    lean = SimpleNamespace(
        fits=fits, step_seconds=1.0 + recomputes, least_seconds=1.0, inner=SimpleNamespace(evaluation=Cost(1.0, 1.0))
    )
    fast = SimpleNamespace(
        fits=True, step_seconds=2.0, least_seconds=1.0 - saves, inner=SimpleNamespace(evaluation=Cost(1.0 - saves, 2.0))
    )
    assert plans_between(None, [lean, fast]) == []
